"""The network over tokens as a controller: the rule without training, for any host, kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from esper.archive import ArchiveError, read_archive, write_archive
from esper.leyline import Actions, EsperError, LifecycleOp
from esper.tamiyo import TokenActorCritic, TokenController, TokenLayout
from esper.tamiyo.controllers import Audition, make_controller
from esper.tamiyo.controllers.auditioning import Casting, fitting
from esper.tamiyo.controllers.learned import (
    KIND,
    VERSION,
    controller_of_network,
    load_saved,
    load_saved_controller,
    save_controller,
)
from tests.tamiyo.gardens import Tape, TapeGarden, decisions, play
from tests.tamiyo.test_controllers import over_tokens

SPEC = "audition:spend=3.0,certain=1.0"


@pytest.mark.parametrize(("host", "spec"), [("conv1d", SPEC), ("mlp", "audition"), ("gpt", SPEC)])
def test_without_training_it_decides_as_the_rule_does(host: str, spec: str) -> None:
    garden = TapeGarden(Tape.random(16, seed=5, host=host))
    rule = make_controller(spec)
    assert isinstance(rule, Audition)
    alone = decisions(garden, rule)
    spent = garden.spent
    controller = TokenController(TokenActorCritic(), rule)
    assert torch.equal(decisions(garden, controller), alone)
    assert torch.equal(garden.spent, spent)
    assert bool((alone[..., 0] == LifecycleOp.GERMINATE).any())


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999), trained=st.booleans())
def test_it_adds_what_it_has_learned_to_the_rules_hopes_of_who_is_tried_out_alone(
    seed: int, trained: bool
) -> None:
    controller = over_tokens(True) if trained else TokenController(TokenActorCritic())
    assert isinstance(controller, TokenController)
    alone, casting = Casting(controller.rule), Casting(controller.rule, controller)
    casts = []
    for each in (alone, casting):
        garden = TapeGarden(Tape.random(1, seed=seed))
        casts.append(next((each.finalists for _ in play(garden, each) if each.finalists), ()))
    assume(casts[0])  # something fits the budget
    assert casting.name == controller.name
    assert casts[0][0] == casts[1][0], "those that are tried out together"
    signals, legal = garden.signals(), garden.legal()
    found, fits = controller.hopes(signals), fitting(signals)[0]
    if not trained:
        assert casts[0] == casts[1]
        assert torch.equal(found[fits], torch.zeros_like(found[fits]))
    waits = Actions.of(legal.space, 1, op=LifecycleOp.WAIT)
    with torch.no_grad():
        seen = controller.network.layout.observe(signals, waits)
        logits = controller.network(seen).logits
    slots, kinds = logits["slot"], logits["blueprint"]
    for slot, kind in fits.nonzero().tolist():
        rows = torch.tensor([s for s in range(len(fits)) if fits[s].any()])
        own = slots[0, LifecycleOp.GERMINATE].double()
        chance = own[slot].exp() / own[rows].exp().sum() * len(rows)
        within = kinds[0, slot].double()
        chance *= within[kind].exp() / within[fits[slot]].exp().sum() * fits[slot].sum()
        assert float(found[slot, kind]) == pytest.approx(float(chance.log()), abs=1e-6)


def test_one_controller_decides_for_hosts_of_other_shapes_in_turn() -> None:
    controller = over_tokens(True)
    found = [
        decisions(TapeGarden(Tape.random(4, host=host)), controller)
        for host in ("conv1d", "gpt", "conv1d")
    ]
    assert torch.equal(found[0], found[2])
    assert isinstance(controller, TokenController)
    controller.require_possible(Tape.random(1, host="mlp").catalogue, 25)
    with pytest.raises(EsperError, match="audition"):
        controller.require_possible(Tape.random(1, host="mlp").catalogue, 2)


def test_it_goes_on_with_what_it_is_told_that_it_remembered() -> None:
    whole, first, second = over_tokens(True), over_tokens(True), over_tokens(True)
    gardens = [TapeGarden(Tape.random(6)) for _ in range(2)]
    for step, (one, _) in enumerate(zip(play(gardens[0], whole), range(12), strict=False)):
        garden = gardens[1]
        signals, legal = garden.signals(), garden.legal()
        if step == 6:
            second.recall({name: each.clone() for name, each in first.memory().items()})
        controller = second if step >= 6 else first
        actions = controller.act(signals, legal, torch.full((6,), step == 0))
        garden.plan = controller.audition(signals, legal)
        assert torch.equal(actions.values, one.values)
        garden.step(actions)
    assert controller.thoughts().observations.shape == (6, TokenLayout(3, 7).state_dim)
    second.recall({})
    assert second.memory() == {}


def test_the_rule_counts_what_was_planted_and_not_what_it_said() -> None:
    network = TokenActorCritic()
    network.bias_action_logit("op", LifecycleOp.GERMINATE, -50.0)
    controller = TokenController(network, make_controller(SPEC))
    garden, advised = TapeGarden(Tape.random(16, seed=5)), 0
    for actions in play(garden, controller):
        assert not bool((actions["op"] == LifecycleOp.GERMINATE).any())
        advised += int((controller._proposed_actions["op"] == LifecycleOp.GERMINATE).sum())
        assert not bool(controller.rule.remembered.planted.any())
    assert advised > 3 * 16  # it says so again and again


def test_it_is_kept_with_its_rule_and_read_back(tmp_path: Path) -> None:
    controller = over_tokens(True)
    path = save_controller(controller.network, tmp_path / "own", None, {"name": "own"}, rule=SPEC)
    kept, back = load_saved(path), load_saved_controller(path, "own")
    assert (kept.slots, kept.blueprints, kept.card, kept.rule) == ((), (), {"name": "own"}, SPEC)
    assert isinstance(back, TokenController)
    assert back.rule.name == SPEC
    assert (
        back.fingerprint == TokenController(controller.network, make_controller(SPEC)).fingerprint
    )
    assert back.fingerprint != controller.fingerprint  # another rule advises it
    assert type(controller_of_network(controller.network)) is TokenController


@pytest.mark.parametrize("rule", ["heuristic", "audition:first=", 3, None])
def test_a_rule_that_is_none_is_refused(rule: Any, tmp_path: Path) -> None:
    path = save_controller(TokenActorCritic(), tmp_path / "own", None, {})
    old = read_archive(path, kind=KIND, version=VERSION)
    notes = dict(old.notes) | {"rule": rule}
    write_archive(path, kind=KIND, version=VERSION, tensors=old.tensors, notes=notes)
    with pytest.raises(ArchiveError, match="does not describe a controller"):
        load_saved(path)


def test_weights_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = save_controller(TokenActorCritic(), tmp_path / "own", None, {})
    old = read_archive(path, kind=KIND, version=VERSION)
    tensors = {name: each for name, each in old.tensors.items() if name != "memory_proj.bias"}
    write_archive(path, kind=KIND, version=VERSION, tensors=tensors, notes=old.notes)
    with pytest.raises(ArchiveError, match="other tensors: memory_proj"):
        load_saved(path)
