"""The rule `audition`, on readings that are given."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.tamiyo.controllers import make_controller
from tests.tamiyo.gardens import HORIZON, Tape, TapeGarden, ops_of, play


def quiet_tape(gain: float = 0.0, *, at: tuple[int, int] | None = None, **steady: float) -> Tape:
    """Shadows show nothing, but for one at this (slot, blueprint)."""
    tape = Tape.steady(**steady)  # type: ignore[arg-type]
    shape = (1, HORIZON, len(tape.catalogue.slots), len(tape.catalogue.names))
    gains = torch.zeros(shape, dtype=torch.float64)
    if at is not None:
        gains[0, :, at[0], at[1]] = gain
    return dataclasses.replace(tape, shadow_gain=gains)


def planted(tape: Tape, spec: str = "audition") -> list[tuple[int, int, int]]:
    """(epoch, slot, blueprint) of every planting."""
    garden = TapeGarden(tape)
    found = []
    for epoch, actions in enumerate(play(garden, make_controller(spec))):
        if actions["op"][0] == 1:
            found.append((epoch, int(actions["slot"][0]), int(actions["blueprint"][0])))
    return found


def test_what_is_clearly_missing_is_planted_after_one_round() -> None:
    place = (1, 2)
    (first, *others) = planted(quiet_tape(0.5, at=place))
    assert first == (2, *place)  # alone for an epoch, heard for one
    assert not others


def test_without_anything_certain_a_large_seed_is_planted_where_much_is_unlearned() -> None:
    tape = quiet_tape(loss=1.5)
    sizes = torch.tensor(tape.catalogue.costs)
    _, slot, blueprint = planted(tape)[0]
    assert sizes[slot, blueprint] >= 0.5 * sizes.max()


@pytest.mark.parametrize("steady", [{"loss": 0.1}, {"gap": 1.0}])
def test_a_host_that_has_learned_its_task_or_learns_by_heart_is_left_alone(
    steady: dict[str, float],
) -> None:
    assert planted(quiet_tape(**steady)) == []


def test_what_harms_is_pruned_and_what_helps_is_kept() -> None:
    for worth, end in ((3.0, "FOSSILIZE"), (-3.0, "PRUNE")):
        tape = quiet_tape(0.5, at=(0, 1), contribution=(worth, worth, worth))  # type: ignore[arg-type]
        ops = [op for _, op, _ in ops_of(TapeGarden(tape), make_controller("audition"))[0]]
        assert ops[0] == "GERMINATE"
        assert end in ops


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 99),
    spend=st.sampled_from([0.05, 0.3, 0.6, 2.0]),
    rounds=st.integers(1, 5),
    first=st.integers(1, 4),
)
def test_shadows_never_cost_more_than_may_be_spent(
    seed: int, spend: float, rounds: int, first: int
) -> None:
    garden = TapeGarden(Tape.random(6, seed=seed))
    spec = f"audition:spend={spend},rounds={rounds},first={first}"
    for _ in play(garden, make_controller(spec)):
        assert garden.plan is not None
        where, share = garden.plan
        assert bool(((share >= 0) & (share <= 1)).all())
        assert not bool((where & garden.shadows.cost.isnan()).any())
        if garden.epoch < first:
            assert not bool(where.any())
    assert bool((garden.spent <= spend * HORIZON + 1e-9).all())
