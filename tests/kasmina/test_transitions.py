"""Decisions, time and gates over the arrays: examples that a person can follow."""

import pytest
import torch

from esper.kasmina import GATES, GateRules, Situation, decide, explain, legality, pass_time
from esper.kasmina.gates import OP_GATES, UNLIMITED, closed_gates
from esper.kasmina.transitions import blend_alpha, remove_now
from esper.leyline import (
    HEADS,
    TRANSITIONS,
    Actions,
    AgreementError,
    Blend,
    BlueprintCatalogue,
    EsperError,
    GateRefusedError,
    Lifecycle,
    LifecycleOp,
    SeedStage,
    SlotConfig,
    Transitions,
)

CATALOGUE = BlueprintCatalogue(
    SlotConfig(),
    ("small", "large", "elsewhere"),
    ((10, 100, -1), (10, 100, -1), (10, 100, 30)),
    ((0, 0, 5),) * 3,
    host_params=1000,
)
SPACE = HEADS.resolve(CATALOGUE)
OP = LifecycleOp


class World:
    """Two hosts whose arrays are driven one decision at a time."""

    def __init__(self, hosts: int = 2, budget: int = UNLIMITED, **rules: object) -> None:
        self.situation = Situation(
            Lifecycle.dormant(hosts, 3),
            CATALOGUE,
            GateRules(**rules),  # type: ignore[arg-type]
            torch.full((hosts,), budget),
        )

    @property
    def life(self) -> Lifecycle:
        return self.situation.life

    def _adopt(self, life: Lifecycle, record: Transitions) -> list[str]:
        s = self.situation
        self.situation = Situation(life, s.catalogue, s.rules, s.budget)
        return [f"{r.host}.{r.slot} {r.before.name}>{r.after.name} by {r.cause}" for r in record]

    def do(self, op: OP, slot: int = 0, blueprint: int = 0, blend: int = Blend.RAMP) -> list[str]:
        """Host 0 acts, the others wait."""
        hosts = self.life.shape[0]
        ops = torch.zeros(hosts, dtype=torch.int64)
        ops[0] = op
        actions = Actions.of(SPACE, hosts, op=ops, slot=slot, blueprint=blueprint, blend=blend)
        return self._adopt(*decide(self.situation, actions))

    def epoch(self, contribution: float = 1.0, gradient: float = 1.0) -> list[str]:
        shape = self.life.shape
        life = self.life.measured(
            contribution=torch.full(shape, contribution, dtype=torch.float64),
            gradient=torch.full(shape, gradient, dtype=torch.float64),
        )
        s = self.situation
        return self._adopt(*pass_time(Situation(life, s.catalogue, s.rules, s.budget)))

    def stage(self, slot: int = 0) -> SeedStage:
        return SeedStage(int(self.life.stage[0, slot]))


def test_a_ramped_seed_contributes_within_a_few_epochs() -> None:
    world = World()
    assert world.do(OP.GERMINATE) == [
        "0.0 DORMANT>GERMINATED by GERMINATE",
        "0.0 GERMINATED>TRAINING by GERMINATE",
    ]
    world.epoch()
    assert world.do(OP.ADVANCE) == ["0.0 TRAINING>BLENDING by ADVANCE"]
    alphas = [float(world.life.alpha[0, 0])]
    for _ in range(2):
        world.epoch()
        alphas.append(float(world.life.alpha[0, 0]))
    assert alphas == pytest.approx([7 / 27, 20 / 27, 1.0])
    assert world.stage() is SeedStage.HOLDING
    world.epoch()
    assert world.do(OP.FOSSILIZE) == ["0.0 HOLDING>FOSSILIZED by FOSSILIZE"]
    assert int(world.life.epoch[0]) == 4
    assert world.life.interventions.tolist() == [3, 0]
    assert world.life.stage[1].tolist() == [0, 0, 0], "the other host waited"


def test_an_immediate_seed_goes_straight_to_holding_and_records_every_stage() -> None:
    world = World()
    stages = [step.split(" ")[1] for step in world.do(OP.GERMINATE, blend=Blend.IMMEDIATE)]
    assert stages == [
        "DORMANT>GERMINATED",
        "GERMINATED>TRAINING",
        "TRAINING>BLENDING",
        "BLENDING>HOLDING",
    ]
    assert float(world.life.alpha[0, 0]) == 1.0
    world.epoch()
    assert world.do(OP.FOSSILIZE)


def test_a_blended_seed_fades_before_it_is_removed_and_its_slot_rests() -> None:
    world = World(prune_tempo=3, embargo=2)
    world.do(OP.GERMINATE, blend=Blend.IMMEDIATE)
    assert world.do(OP.PRUNE) == ["0.0 HOLDING>PRUNED by PRUNE"]
    seen = []
    while world.stage() is not SeedStage.DORMANT:
        seen.append((world.stage().name, round(float(world.life.alpha[0, 0]), 3)))
        world.epoch()
    assert seen == [
        ("PRUNED", 0.667),
        ("PRUNED", 0.333),
        ("EMBARGOED", 0.0),
        ("EMBARGOED", 0.0),
        ("RESETTING", 0.0),
    ]
    assert world.do(OP.GERMINATE), "the slot is free again"


def test_a_seed_that_never_blended_is_removed_at_once() -> None:
    world = World()
    world.do(OP.GERMINATE)
    assert world.do(OP.PRUNE) == [
        "0.0 TRAINING>PRUNED by PRUNE",
        "0.0 PRUNED>EMBARGOED by PRUNE",
    ]
    assert int(world.life.params.sum()) == 0
    assert int(world.life.blueprint[0, 0]) == -1


def test_the_governor_removes_at_once_and_never_touches_what_is_permanent() -> None:
    world = World()
    world.do(OP.GERMINATE, slot=0, blend=Blend.IMMEDIATE)
    world.epoch()
    world.do(OP.FOSSILIZE, slot=0)
    world.do(OP.GERMINATE, slot=1, blend=Blend.IMMEDIATE)
    world.do(OP.PRUNE, slot=1)
    world.do(OP.GERMINATE, slot=2, blend=Blend.IMMEDIATE)
    life, record = remove_now(world.situation, torch.tensor([[False, True, True], [False] * 3]))
    assert life.stage[0].tolist() == [
        SeedStage.FOSSILIZED,
        SeedStage.EMBARGOED,
        SeedStage.EMBARGOED,
    ]
    assert {r.cause for r in record} == {"GOVERNOR"}
    assert life.params[0].tolist() == [10, 0, 0]
    with pytest.raises(GateRefusedError, match="FOSSILIZED"):
        remove_now(world.situation, torch.tensor([[True, False, False], [False] * 3]))


@pytest.mark.parametrize(
    ("prepare", "op", "slot", "reason"),
    [
        ([], OP.ADVANCE, 0, "the slot is DORMANT, not TRAINING"),
        ([], OP.FOSSILIZE, 1, "the slot is DORMANT, not HOLDING"),
        ([], OP.PRUNE, 2, "not GERMINATED or TRAINING or BLENDING or HOLDING"),
        (["plant"], OP.GERMINATE, 0, "the slot is TRAINING, not DORMANT"),
        (["plant"], OP.ADVANCE, 0, "0 epochs in TRAINING, at least 1 needed"),
        (["plant"], OP.ADVANCE, 0, "gradient has not been measured yet"),
        (["plant", "dead epoch"], OP.ADVANCE, 0, "gradient norm is 0"),
        (["immediate"], OP.FOSSILIZE, 0, "0 epochs in HOLDING"),
        (["immediate"], OP.FOSSILIZE, 0, "contribution has not been measured yet"),
        (["immediate", "bad epoch"], OP.FOSSILIZE, 0, "contributes -1, at least 0.0 needed"),
        (["plant", "prune"], OP.GERMINATE, 0, "the slot is EMBARGOED"),
    ],
)
def test_every_refusal_has_a_readable_reason(
    prepare: list[str], op: OP, slot: int, reason: str
) -> None:
    world = World()
    steps = {
        "plant": lambda: world.do(OP.GERMINATE),
        "immediate": lambda: world.do(OP.GERMINATE, blend=Blend.IMMEDIATE),
        "prune": lambda: world.do(OP.PRUNE),
        "dead epoch": lambda: world.epoch(gradient=0.0),
        "bad epoch": lambda: world.epoch(contribution=-1.0),
    }
    for step in prepare:
        steps[step]()
    before = world.life
    assert any(reason in said for said in explain(world.situation, 0, op, slot))
    with pytest.raises(GateRefusedError) as refusal:
        world.do(op, slot)
    assert reason in str(refusal.value)
    assert world.life is before, "a refused decision changes nothing"


def test_an_unstable_host_fossilizes_nothing() -> None:
    world = World(max_loss_rise=0.5)
    world.do(OP.GERMINATE, blend=Blend.IMMEDIATE)
    world.epoch()
    shaken = world.life.measured(loss_rise=torch.tensor([0.9, 0.0]))
    situation = Situation(shaken, CATALOGUE, world.situation.rules, world.situation.budget)
    assert explain(situation, 0, OP.FOSSILIZE, 0) == [
        "the training loss rose by 90% in the last epoch, at most 50% allowed"
    ]


def test_closed_gates_are_told_also_where_rules_are_off() -> None:
    world = World(min_holding_epochs=2, max_loss_rise=None, min_contribution=None)
    world.do(OP.GERMINATE, blend=Blend.IMMEDIATE)
    (closed,) = closed_gates(world.situation)
    assert closed == (0, 0, OP.FOSSILIZE, "0 epochs in HOLDING, at least 2 needed")


def test_the_budget_counts_every_seed_that_exists_and_the_blends_own_parameters() -> None:
    world = World(budget=114)
    world.do(OP.GERMINATE, slot=0, blueprint=1)  # 100
    room = explain(world.situation, 0, OP.GERMINATE, 1, blueprint=0, blend=Blend.GATE)
    assert room == ["'small' with blend GATE costs 15 parameters, the budget has room for 14"]
    legal = legality(world.situation, SPACE)
    assert legal.masks["blend"][0, 1, 0].tolist() == [True, True, False]
    assert legal.masks["blueprint"][0, 1].tolist() == [True, False, False]
    world.do(OP.GERMINATE, slot=1, blueprint=0)
    assert not bool(legality(world.situation, SPACE).masks["op"][0, OP.GERMINATE])
    assert "room for 4" in explain(world.situation, 0, OP.GERMINATE, 2)[0]
    assert bool(legality(world.situation, SPACE).masks["op"][1, OP.GERMINATE]), "hosts differ"


def test_a_blueprint_that_does_not_fit_the_slot_is_refused_by_name() -> None:
    world = World()
    with pytest.raises(GateRefusedError, match="'elsewhere' does not fit slot 'early'"):
        world.do(OP.GERMINATE, slot=0, blueprint=2)
    assert world.do(OP.GERMINATE, slot=2, blueprint=2)


def test_one_illegal_action_among_many_hosts_changes_none_of_them() -> None:
    world = World()
    actions = Actions.of(SPACE, 2, op=torch.tensor([OP.GERMINATE, OP.PRUNE]))
    with pytest.raises(GateRefusedError, match="host 1"):
        decide(world.situation, actions)
    with pytest.raises(AgreementError, match="3 actions"):
        decide(world.situation, Actions.of(SPACE, 3))


@pytest.mark.parametrize("tempo", [1, 2, 3, 7])
def test_blending_rises_smoothly_and_ends_at_exactly_one(tempo: int) -> None:
    alphas = blend_alpha(torch.arange(tempo), tempo)
    assert float(alphas[-1]) == 1.0
    assert bool((alphas.diff() > 0).all())
    assert bool((alphas > 0).all())


def test_every_transition_of_the_table_has_a_gate_into_its_stage() -> None:
    ways_in = {after for afters in TRANSITIONS.values() for after in afters}
    assert {gate.after for gate in GATES} == ways_in
    assert all(OP_GATES[op].op is op for op in OP_GATES)


@pytest.mark.parametrize("wrong", [{"blend_tempo": 0}, {"prune_tempo": 0}, {"embargo": -1}])
def test_impossible_rules_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(EsperError, match="out of range"):
        GateRules(**wrong)  # type: ignore[arg-type]
