"""Random legal and illegal decisions over N hosts with S slots and real modules in them."""

import itertools

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from esper.kasmina import (
    GateRules,
    SlottedModel,
    build_host,
    decide,
    explain,
    legality,
    pass_time,
    remove_now,
)
from esper.kasmina.gates import OP_GATES, Situation, closed_gates
from esper.leyline import (
    HEADS,
    TRANSITIONS,
    Actions,
    Blend,
    GateRefusedError,
    Lifecycle,
    LifecycleOp,
    SeedStage,
    Transitions,
)

HOSTS = 3
BUDGET = 900


class Growth(RuleBasedStateMachine):
    """A population's arrays beside N wrapped models that receive the same decisions."""

    @initialize(seed=st.integers(0, 2**16))
    def plant_the_garden(self, seed: int) -> None:
        self.models = [SlottedModel(build_host("mlp"), budget=BUDGET) for _ in range(HOSTS)]
        self.catalogue = self.models[0].catalogue
        self.space = HEADS.resolve(self.catalogue)
        self.life = Lifecycle.dormant(HOSTS, len(self.catalogue.slots))
        self.random = torch.Generator().manual_seed(seed)
        self.originals = [
            {name: weight.detach().clone() for name, weight in model.model.named_parameters()}
            for model in self.models
        ]

    @property
    def situation(self) -> Situation:
        return Situation(self.life, self.catalogue, GateRules(), torch.full((HOSTS,), BUDGET))

    def follow(self, life: Lifecycle, record: Transitions) -> None:
        stages = self.life.stage.clone()
        for step in record:  # the record is complete: replaying it gives the new stages
            assert int(stages[step.host, step.slot]) == step.before
            assert step.after in TRANSITIONS[step.before]
            stages[step.host, step.slot] = step.after
        assert torch.equal(stages, life.stage)
        self.life = life

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.random, dtype=torch.float64)

    def random_values(self) -> torch.Tensor:
        sizes = torch.tensor(self.space.sizes)
        return (self.draw(HOSTS, len(sizes)) * sizes).long()

    @rule()
    def decide_anything(self) -> None:
        """Any composite action in range: legal ones happen, others say why and change nothing."""
        actions = Actions(self.space, self.random_values())
        permitted = legality(self.situation, self.space).permits(actions)
        if bool(permitted.all()):
            return self.carry_out(actions)
        before = self.life
        with pytest.raises(GateRefusedError):
            decide(self.situation, actions)
        assert self.life is before
        for host in (~permitted).nonzero()[:, 0].tolist():
            row = {name: int(actions[name][host]) for name in self.space.names}
            reasons = explain(
                self.situation,
                host,
                LifecycleOp(row["op"]),
                row["slot"],
                blueprint=row["blueprint"],
                blend=row["blend"],
            )
            assert reasons
            assert all(len(reason) > 10 for reason in reasons)
            with pytest.raises(GateRefusedError):
                self.models[host].apply(Actions(self.space, actions.values[host : host + 1]))
        self.closed_gates_are_those_whose_stage_is_right(host)

    def closed_gates_are_those_whose_stage_is_right(self, host: int) -> None:
        found = {(row, slot, op): why for row, slot, op, why in closed_gates(self.situation)}
        for slot, op in itertools.product(range(self.life.shape[1]), list(LifecycleOp)[1:]):
            reasons = explain(self.situation, host, op, slot)
            wrong_stage = bool(reasons) and reasons[0].startswith("the slot is ")
            assert found.get((host, slot, op), "") == ("" if wrong_stage else "; ".join(reasons))

    @rule()
    def decide_something_legal(self) -> None:
        """Sample head by head from the masks, as a policy does: never refused."""
        legal = legality(self.situation, self.space)
        values = torch.zeros(HOSTS, len(self.space), dtype=torch.int64)
        for position, name in enumerate(self.space.names):
            mask = legal.mask(name, values)
            assert bool(mask.any(dim=1).all()), f"no legal action in {name}"
            values[:, position] = (self.draw(*mask.shape) * mask).argmax(dim=1)
        self.carry_out(Actions(self.space, values))

    def carry_out(self, actions: Actions) -> None:
        self.follow(*decide(self.situation, actions))
        for host, model in enumerate(self.models):
            model.apply(Actions(self.space, actions.values[host : host + 1]))

    @rule()
    def an_epoch_passes(self) -> None:
        shape = self.life.shape
        measured = {
            "contribution": torch.where(
                self.draw(*shape) < 0.1, torch.nan, self.draw(*shape) - 0.3
            ),
            "gradient": torch.where(self.draw(*shape) < 0.1, 0.0, self.draw(*shape)),
            "loss_rise": self.draw(HOSTS),
        }
        self.life = self.life.measured(**measured)
        self.follow(*pass_time(self.situation))
        for host, model in enumerate(self.models):
            rows = {name: value[host : host + 1] for name, value in measured.items()}
            model.lifecycle = model.lifecycle.measured(**rows)
            model.pass_time()

    @rule()
    def the_governor_removes_something(self) -> None:
        present = self.life.at(
            SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.PRUNED
        )
        where = present & (self.draw(*self.life.shape) < 0.1)
        self.follow(*remove_now(self.situation, where))
        for host, model in enumerate(self.models):
            names = [self.catalogue.slots.names[i] for i in where[host].nonzero()[:, 0].tolist()]
            model.remove_now(*names)

    @invariant()
    def the_models_and_the_population_agree(self) -> None:
        for host, model in enumerate(self.models):
            mine = self.life.rows(torch.tensor([host])).state_dict()
            for name, array in model.lifecycle.state_dict().items():
                assert torch.equal(array, mine[name]), name

    @invariant()
    def accounting_equals_the_sum_over_modules(self) -> None:
        for host, model in enumerate(self.models):
            for index, slot in enumerate(model.slots):
                exists = sum(parameter.numel() for parameter in slot.parameters())
                assert exists == int(self.life.params[host, index])
                assert (slot.seed is not None) == bool(self.life.occupied[host, index])
        assert int(self.life.params.sum(dim=1).max()) <= BUDGET

    @invariant()
    def every_state_is_possible(self) -> None:
        life = self.life
        stage = life.stage
        empty = ~life.occupied
        for array, nothing in ((life.blueprint, -1), (life.blend, -1), (life.params, 0)):
            assert bool((array[empty] == nothing).all())
            assert bool((array[life.occupied] != nothing).all())
        for silent in (SeedStage.DORMANT, SeedStage.TRAINING, SeedStage.EMBARGOED):
            assert bool((life.alpha[stage == silent] == 0).all())
        for full in (SeedStage.HOLDING, SeedStage.FOSSILIZED):
            assert bool((life.alpha[stage == full] == 1).all())
        blending = life.alpha[stage == SeedStage.BLENDING]
        assert bool(((blending > 0) & (blending < 1)).all())
        fading = life.alpha[stage == SeedStage.PRUNED]
        assert bool(((fading > 0) & (fading < 1)).all())
        assert not bool((stage == SeedStage.GERMINATED).any())
        assert bool((life.blend[stage == SeedStage.TRAINING] != Blend.IMMEDIATE).all())

    @invariant()
    def an_action_is_legal_exactly_when_its_gate_accepts(self) -> None:
        situation = self.situation
        masks = legality(situation, self.space).masks
        sizes = torch.tensor([HOSTS, len(self.catalogue.slots)])
        places = (self.draw(len(OP_GATES), 2) * sizes).long().tolist()
        for (op, gate), (host, slot) in zip(OP_GATES.items(), places, strict=True):
            accepted = gate.accepts(situation)
            assert torch.equal(masks["slot"][:, op], accepted)
            # Words for one slot of one host: they are slower than masks.
            reasons = gate.refusals(situation, host, slot)
            assert bool(accepted[host, slot]) == (not reasons)

    @invariant()
    def the_hosts_own_weights_are_untouched(self) -> None:
        for model, original in zip(self.models, self.originals, strict=True):
            for name, value in original.items():
                assert torch.equal(model.model.get_parameter(name), value)


def test_thousands_of_random_decisions_reach_no_illegal_state() -> None:
    # 12 runs of 60 steps over 3 hosts: 2,160 host decisions and epochs.
    run_state_machine_as_test(
        Growth, settings=settings(max_examples=12, stateful_step_count=60, deadline=None)
    )
