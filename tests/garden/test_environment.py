"""The garden as a transaction: rewards, ends of episodes, failures, and going on after a save."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from esper.garden import Case, Controls, Draw, Garden, Transition
from esper.garden.episodes import EPOCHS_ALONE
from esper.garden.reward_settings import MODES, RewardConfig
from esper.leyline import AgreementError, LifecycleOp, SeedStage
from esper.leyline.constants import DEFAULT_ROLLBACK_PENALTY
from esper.tamiyo.controllers import FixedSchedule, NeverGrow
from esper.tamiyo.controllers.specs import Arm
from esper.tolaria.plan import HOST
from esper.tolaria.population_config import EpochRecord, PopulationConfig
from tests.garden.plots import (
    CONTEXTS,
    DOUBLE,
    HORIZON,
    PLAIN,
    Listed,
    make_garden,
    some_cases,
    walk,
)

ROWS = 6


def poison(garden: Garden, row: int, at: int) -> None:
    """From now on the `at`-th epoch leaves one row's weights without a number."""
    train: Callable[..., EpochRecord] = garden.episodes.train_epoch
    epochs = iter(range(1000))

    def poisoned(plan: object) -> EpochRecord:
        record = train(plan)
        if next(epochs) == at:
            garden.population.pools[HOST].state.theta[row] = torch.nan
        return record

    garden.episodes.train_epoch = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", list(MODES))
def test_terms_sum_to_the_reward_to_the_bit(mode: str) -> None:
    garden = make_garden(ROWS, reward=RewardConfig(mode=mode))
    garden.reset()
    poison(garden, 1, at=HORIZON - 3)
    for step in walk(garden):
        total = torch.zeros(ROWS, dtype=torch.float64)
        assert tuple(step.terms) == MODES[mode]
        for term in step.terms.values():
            total = total + term
        assert torch.equal(step.rewards, total.float())


def test_the_horizon_is_a_terminal_and_nothing_ends_before() -> None:
    garden = make_garden(ROWS)
    garden.reset()
    first = garden.cases
    rounds = walk(garden, 2 * HORIZON)
    for number, step in enumerate(rounds):
        last = (number + 1) % HORIZON == 0
        assert step.terminals.tolist() == [last] * ROWS
        assert not bool(step.truncations.any())
        assert step.active is not None
        assert bool(step.active.all())
    assert rounds[0].cases == first
    assert rounds[HORIZON].cases == tuple(garden.draw(row, 1) for row in range(ROWS))
    assert rounds[HORIZON - 1].cases == first, "a transition names the cases it was taken in"


def test_a_failing_environment_is_put_back_alone_in_the_same_call() -> None:
    struck, calm = make_garden(ROWS), make_garden(ROWS)
    for garden in (struck, calm):
        garden.reset()
    failing = EPOCHS_ALONE + 2
    poison(struck, row=2, at=failing)
    others = [row for row in range(ROWS) if row != 2]
    for number in range(HORIZON):
        (ours,), (theirs,) = walk(struck, 1), walk(calm, 1)
        for name in ("accuracy", "committed"):
            torch.testing.assert_close(
                getattr(ours.epoch, name)[others],
                getattr(theirs.epoch, name)[others],
                rtol=1e-9,
                atol=1e-9,
            )
        torch.testing.assert_close(
            ours.terms.total[others], theirs.terms.total[others], rtol=1e-9, atol=1e-9
        )
        assert ours.active is not None
        assert ours.active.tolist() == [row != 2 or number <= failing for row in range(ROWS)]
        ended = number + 1 == HORIZON
        assert ours.terminals.tolist() == [
            number == failing if row == 2 else ended for row in range(ROWS)
        ]
        if number == failing:
            _assert_penalised(struck, ours)
        if number > failing:
            assert float(ours.rewards[2]) == 0.0
            assert int(ours.actions["op"][2]) == LifecycleOp.WAIT
        if failing <= number < HORIZON - 1:
            assert struck.legal().masks["op"][2].tolist() == [True, False, False, False, False]
    assert int(struck.lifecycle.epoch.max()) == 0, "all start together"
    walk(struck, EPOCHS_ALONE)
    assert struck.legal().masks["op"][2, LifecycleOp.GERMINATE], "and may grow again"


def _assert_penalised(garden: Garden, step: Transition) -> None:
    assert step.epoch.rolled_back.tolist() == [row == 2 for row in range(ROWS)]
    assert [trip.environment for trip in step.epoch.trips] == [2]
    scale = step.cases[2].context.scale
    assert float(step.terms["rollback"][2]) <= -DEFAULT_ROLLBACK_PENALTY / scale
    assert float(step.rewards[2]) < 0
    population = garden.population
    assert bool(population.pools[HOST].state.theta[2].isfinite().all())
    assert not bool(
        population.lifecycle.at(SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING)[2].any()
    )
    assert bool(garden.observations().isfinite().all())


def test_what_a_rollback_undid_is_not_recorded_and_what_it_removed_is() -> None:
    garden = make_garden(2, draw=Listed(some_cases(2)))
    garden.reset()
    poison(garden, row=0, at=EPOCHS_ALONE + 2)
    arm = Arm(slot="early", blueprint="mlp", blend="ramp", epoch=EPOCHS_ALONE)
    stages = [
        [(each.before, each.after) for each in step.epoch.transitions if each.host == 0]
        for step in walk(garden, EPOCHS_ALONE + 3, FixedSchedule(arm))
    ]
    assert stages[EPOCHS_ALONE][0][0] is SeedStage.DORMANT
    chain = [pair for step in stages for pair in step]
    for (_, after), (before, _) in pairwise(chain):
        assert before is after, "every stage follows from the one before"
    now = SeedStage(int(garden.lifecycle.stage[0, 0]))
    assert chain[-1][1] is now
    assert SeedStage.PRUNED in [after for _, after in stages[-1]]


def test_a_failure_in_the_first_epoch_scores_chance() -> None:
    garden = make_garden(2)
    garden.reset()
    poison(garden, row=0, at=0)
    (step,) = walk(garden, 1)
    assert step.terminals.tolist() == [True, False]
    assert float(step.epoch.committed[0]) == pytest.approx(10.0)
    assert bool(step.rewards.isfinite().all())


def test_in_place_a_row_starts_anew_as_soon_as_its_own_episode_is_over() -> None:
    garden = make_garden(3, in_place=True)
    garden.reset()
    poison(garden, row=1, at=1)
    steps = walk(garden, HORIZON + 2)
    ends = [step.terminals.nonzero()[:, 0].tolist() for step in steps]
    assert ends == [[], [1], *[[]] * (HORIZON - 3), [0, 2], [], [1]]
    assert steps[2].cases[1] == garden.draw(1, 1)
    assert steps[2].cases[0] == garden.draw(0, 0)
    fresh = make_garden(1, draw=Listed((garden.draw(1, 1),)))
    torch.testing.assert_close(steps[1].observations[1:2], fresh.reset(), rtol=1e-6, atol=1e-6)
    assert steps[1].final_observations is not None
    assert not torch.equal(steps[1].final_observations[1], steps[1].observations[1])
    assert bool(torch.stack([step.active for step in steps]).all())  # type: ignore[arg-type]


def test_a_saved_garden_goes_on_bit_for_bit() -> None:
    single = PopulationConfig()  # float32: company would show in the last bits
    garden = make_garden(ROWS, config=single)
    garden.reset()
    walk(garden)
    state = {name: value.clone() for name, value in garden.state_dict().items()}
    measured = garden.controls.state_dict()
    first = garden.observations()
    expected = walk(garden, 2 * HORIZON)
    again = make_garden(ROWS, config=single)
    again.controls.load_state_dict(measured)  # measured again they might differ in the last bits
    assert torch.equal(again.load_state_dict(state), first)
    kept = again.controls.state_dict()
    assert len(measured) >= ROWS
    assert all(torch.equal(kept[name], curve) for name, curve in measured.items())
    for ours, theirs in zip(walk(again, 2 * HORIZON), expected, strict=True):
        assert torch.equal(ours.rewards, theirs.rewards)
        assert torch.equal(ours.observations, theirs.observations)
        assert ours.cases == theirs.cases
    with pytest.raises(AgreementError, match=r"another number of rows; given: \[6\]; valid: \[2\]"):
        make_garden(2).load_state_dict(state)


def test_a_garden_is_not_saved_in_the_middle_of_a_round() -> None:
    garden = make_garden(2)
    garden.reset()
    garden.state_dict()
    walk(garden, 1)
    with pytest.raises(AgreementError, match="between rounds"):
        garden.state_dict()
    walk(garden, HORIZON - 1)
    garden.state_dict()


def test_never_growing_gains_exactly_nothing_over_its_control() -> None:
    garden = make_garden(ROWS, draw=Listed(some_cases(ROWS)))  # controls in the same company
    garden.reset()
    for step in walk(garden, controller=NeverGrow()):
        assert step.terms.total.abs().max() == 0.0
    other = make_garden(3)  # controls in other company
    other.reset()
    for step in walk(other, 2 * HORIZON, NeverGrow()):
        torch.testing.assert_close(
            step.terms.total, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-9
        )


def test_observations_know_neither_the_name_nor_the_scale_of_a_context() -> None:
    renamed = replace(PLAIN, name="another", family="gain", scale=2 * PLAIN.scale)
    gardens = [make_garden(1, draw=Listed((Case(each, 3),))) for each in (PLAIN, renamed)]
    seen = [garden.reset() for garden in gardens]
    assert torch.equal(*seen)
    for ours, theirs in zip(*(walk(garden) for garden in gardens), strict=True):
        assert torch.equal(ours.observations, theirs.observations)
        torch.testing.assert_close(ours.terms.total, 2 * theirs.terms.total)


def test_lesioned_and_whole_hosts_have_the_same_first_observation() -> None:
    cases = tuple(Case(context, 0) for context in CONTEXTS)
    first = make_garden(len(cases), draw=Listed(cases)).reset()
    assert bool((first == first[:1]).all()), "before the first epoch there is nothing to tell"


def test_gardens_share_the_controls_they_are_given() -> None:
    shared = Controls(horizon=HORIZON, config=DOUBLE)
    first = make_garden(3, controls=shared)
    first.reset()
    known = len(shared)
    assert known > 0
    make_garden(2, controls=shared).reset()
    assert len(shared) == known


def test_wrong_use_gets_a_sentence() -> None:
    with pytest.raises(AgreementError, match=r"world of its controls; given: \['horizon'\]"):
        make_garden(1, controls=Controls(horizon=2), horizon=3)
    with pytest.raises(AgreementError, match="nothing to draw"):
        Draw(contexts=(), seeds=3)


def test_a_round_lasts_as_long_as_an_episode_also_when_every_row_failed() -> None:
    garden = make_garden(1)
    garden.reset()
    first = garden.cases
    poison(garden, row=0, at=1)
    steps = walk(garden, HORIZON + 1)
    assert [bool(step.terminals[0]) for step in steps[:HORIZON]].count(True) == 1
    assert bool(steps[1].terminals[0])
    assert all(step.cases == first for step in steps[:HORIZON])
    assert steps[HORIZON].cases == (garden.draw(0, 1),)


def test_equal_seeds_of_two_contexts_share_no_random_numbers() -> None:
    cases = [Case(context, 7) for context in CONTEXTS]
    garden = make_garden(len(cases), draw=Listed(tuple(cases)))
    garden.reset()
    draws = {tuple(row) for row in garden.signals().draws.tolist()}
    weights = {tuple(row[:8].tolist()) for row in garden.population.pools[HOST].state.theta}
    assert len(draws) == len(cases)
    assert len(weights) == len(cases) + 1  # and the spare row
