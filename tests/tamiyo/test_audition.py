"""The rule `audition`, on readings that are given."""

import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from esper.leyline import Blend, Trait
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.controllers.auditioning import (
    ALONE,
    LISTENING,
    Audition,
    Cast,
    Casting,
    _best_of_kinds,
    expected,
)
from tests.tamiyo.gardens import HORIZON, Tape, TapeGarden, catalogue_of, ops_of, play


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


@pytest.mark.slow
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


def casting(spec: str = "audition") -> Casting:
    rule = make_controller(spec)
    assert isinstance(rule, Audition)
    return Casting(rule)


def finalists(tape: Tape, rule: Casting) -> tuple[Cast, ...]:
    garden = TapeGarden(tape)
    heard = [rule.finalists for _ in play(garden, rule)]
    return next((each for each in heard if each), ())


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), tries=st.integers(1, 5), casts=st.integers(1, 3))
def test_finalists_fit_together_in_slots_of_their_own_and_are_of_many_kinds_and_then_alone(
    seed: int, tries: int, casts: int
) -> None:
    tape = Tape.random(1, seed=seed)
    found = finalists(tape, casting(f"audition:tries={tries},casts={casts}"))
    assume(found)  # something fits the budget
    together, *others = found
    places = [divmod(number, len(tape.catalogue.names)) for number in together]
    assert 1 <= len(together) <= tries
    assert len({slot for slot, _ in places}) == len(together)
    costs = tape.catalogue.total_costs[:, :, Blend.IMMEDIATE]
    assert sum(int(costs[place]) for place in places) <= int(tape.budget[0])
    kinds = [kind for _, kind in places]
    fresh = [kind not in kinds[:turn] for turn, kind in enumerate(kinds)]
    assert fresh == sorted(fresh, reverse=True)  # another of the same kind comes later
    assert len(set(found)) == len(found) <= casts
    assert all(len(each) == 1 for each in others)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999))
def test_plain_capacity_is_heard_only_where_nothing_else_fits(seed: int) -> None:
    garden = TapeGarden(Tape.random(1, seed=seed))
    plain, heard = garden.tape.catalogue.has(Trait.PLAIN), set[bool]()
    for _ in play(garden, casting()):
        assert garden.plan is not None
        heard |= set(plain[garden.plan.where[0]].tolist())
    assume(heard)  # something fits the budget
    assert len(heard) == 1


def test_alone_without_a_sound_the_kind_counts_and_what_is_loud_goes_before_it() -> None:
    catalogue = quiet_tape().catalogue
    local, norm = catalogue.index("depthwise"), catalogue.index("norm")
    last = len(catalogue.slots) - 1  # late rather than early
    for gain, place in ((0.0, (last, local)), (0.002, (last, local)), (0.03, (0, norm))):
        _, (alone,) = finalists(quiet_tape(gain, at=(0, norm)), casting())
        assert divmod(alone, len(catalogue.names)) == place


def test_together_the_best_by_gain_over_all_rounds_is_the_first() -> None:
    tape = quiet_tape()
    assert tape.shadow_gain is not None
    once, often = (tape.catalogue.index(name) for name in ("norm", "depthwise"))
    tape.shadow_gain[0, -20:, 0, once] = -0.1
    tape.shadow_gain[0, 5, 0, once] = 0.3  # in one round only
    tape.shadow_gain[0, :, 1, often] = 0.2
    (first, *_), *_ = finalists(tape, casting())
    assert first == 1 * len(tape.catalogue.names) + often


def test_norms_promise_something_beside_convolutions_and_nothing_elsewhere() -> None:
    for host, better in (("conv1d", True), ("mlp", False)):
        catalogue = catalogue_of(host)
        worth = expected(catalogue)
        plain = worth[catalogue.has(Trait.PLAIN)].mean()
        assert bool((worth[catalogue.has(Trait.NORMALISES)] > plain).all()) is better
        assert bool((worth[catalogue.has(Trait.LOCAL) & ~catalogue.has(Trait.PLAIN)] > plain).all())


def test_what_was_taken_is_planted_in_turn_and_nothing_else_is() -> None:
    tape = quiet_tape(0.5, at=(1, 2))
    count = len(tape.catalogue.names)
    rule = casting()
    rule.take((0 * count + 1, 2 * count + 0))
    garden = TapeGarden(tape)
    plants = [
        (epoch, int(actions["slot"][0]), int(actions["blueprint"][0]))
        for epoch, actions in enumerate(play(garden, rule))
        if actions["op"][0] == 1
    ]
    assert plants == [(1, 0, 1), (2, 2, 0)]
    assert rule.cast == (1, 2 * count)
    other = casting()
    other.recall(rule.memory())
    assert other.cast == rule.cast
    other.take(ALONE)
    other.recall(casting().memory() | {"cast": torch.tensor(LISTENING)})
    assert other.cast == ALONE  # what was taken goes before what is remembered
    assert not any(actions["op"][0] == 1 for actions in play(TapeGarden(tape), other))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), count=st.integers(1, 12))
def test_of_every_kind_the_best_by_gain_or_gradient_go_on(seed: int, count: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    going = torch.rand(3, 5, 4, generator=chance) < 0.7
    gain, gradient = torch.randn(2, 3, 5, 4, generator=chance, dtype=torch.float64).unbind(0)
    best = _best_of_kinds(going, gain, gradient, count)
    assert not bool((best & ~going).any())
    for row in range(3):
        kinds = int(going[row].any(0).sum())
        each = max(2, -(-count // max(kinds, 1)))
        for kind in range(4):
            there, kept = going[row, :, kind], best[row, :, kind]
            assert int(kept.sum()) == min(each, int(there.sum()))
            if bool(there.any()):
                numbers = there.nonzero()[:, 0]
                for score in (gain, gradient):
                    assert bool(kept[numbers[score[row, numbers, kind].argmax()]])
