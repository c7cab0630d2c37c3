"""Episodes: rows that are started on cases, with the lesion and the change of task of each."""

from dataclasses import replace

import pytest
import torch

from esper.garden import Case, Episodes, Garden, by_shape
from esper.garden.attribution import leave_one_out
from esper.garden.contexts import Context
from esper.garden.episodes import EPOCHS_ALONE, measure, uncommitted
from esper.leyline import AgreementError, GateRefusedError, SeedStage, UnknownNameError
from esper.leyline.legality import Actions
from esper.leyline.ops import Blend, LifecycleOp
from esper.tamiyo.controllers import NeverGrow, RandomLegal
from esper.tolaria.plan import HOST
from tests.garden.plots import (
    CONTEXTS,
    DOUBLE,
    DRIFT,
    HORIZON,
    LESION,
    PLAIN,
    make_garden,
    walk,
)

EVERYONE = torch.arange(4)


@pytest.fixture(autouse=True)
def _short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.garden.episodes.GARDEN_BATCHES", 2)


def make_episodes(rows: int = 4) -> Episodes:
    return Episodes(CONTEXTS, rows, horizon=HORIZON, config=DOUBLE)


def drifting_seed(context: Context, *, changes: bool) -> int:
    return next(s for s in range(99) if (context.drift_epoch(s) is not None) == changes)


def live_on(episodes: Episodes, epochs: int) -> None:
    for _ in range(epochs):
        episodes.train_epoch()
        episodes.population.pass_time()


def test_a_row_changes_its_task_at_its_own_epoch_and_only_where_chance_says_so() -> None:
    episodes = make_episodes()
    seed, calm = (drifting_seed(DRIFT, changes=changes) for changes in (True, False))
    episodes.begin(
        EVERYONE, [Case(DRIFT, seed), Case(DRIFT, calm), Case(PLAIN, 0), Case(LESION, 0)]
    )
    first = episodes.population.feed.assignment.tolist()
    when = DRIFT.drift_epoch(seed)
    assert when is not None
    for epoch in range(HORIZON):
        assert episodes.drifting().tolist() == ([0] if epoch == when else [])
        live_on(episodes, 1)
        now = episodes.population.feed.assignment.tolist()
        assert (now[0] != first[0]) == (epoch >= when), "from that epoch on"
        assert now[1:] == first[1:]
    xor = DRIFT.drift
    assert xor is not None
    ((inputs, labels),) = episodes.population.feed.held_out("test", torch.tensor([0]))
    assert torch.equal(labels[0], xor.load().test.labels)
    assert torch.equal(inputs[0], xor.load().test.inputs.double())
    episodes.begin(torch.tensor([0]), [Case(DRIFT, seed)])
    assert episodes.population.feed.assignment.tolist() == first, (
        "a new episode begins with the old task"
    )


def test_a_case_is_the_same_in_any_row_and_after_any_other() -> None:
    one, many = make_episodes(1), make_episodes()
    case = Case(LESION, 7)
    one.begin(torch.tensor([0]), [case])
    many.begin(EVERYONE, [Case(DRIFT, 1), Case(PLAIN, 2), Case(LESION, 3), Case(PLAIN, 7)])
    live_on(many, 2)
    many.begin(torch.tensor([2]), [case])
    for _ in range(3):
        ours, theirs = one.train_epoch(), many.train_epoch()
        torch.testing.assert_close(ours.loss[0], theirs.loss[2], rtol=1e-9, atol=0)
        for episodes in (one, many):
            episodes.population.pass_time()
    weights = [episodes.population.pools[HOST].state.theta for episodes in (one, many)]
    torch.testing.assert_close(weights[0][0], weights[1][2], rtol=1e-9, atol=1e-11)
    assert int((weights[1][2] == 0).sum()) > 0
    assert int((weights[1][3] == 0).sum()) == 0


def test_a_lesioned_row_becomes_whole_with_its_next_case() -> None:
    episodes = make_episodes(2)
    episodes.begin(torch.arange(2), [Case(LESION, 0), Case(PLAIN, 0)])
    live_on(episodes, 1)
    episodes.begin(torch.arange(2), [Case(PLAIN, 0), Case(LESION, 0)])
    theta = episodes.population.pools[HOST].state.theta
    assert [int((theta[row] == 0).sum()) > 0 for row in range(2)] == [False, True]
    assert episodes.cases == [Case(PLAIN, 0), Case(LESION, 0)]


def test_nothing_is_planted_while_a_host_is_alone() -> None:
    episodes = make_episodes(1)
    episodes.begin(torch.tensor([0]), [Case(PLAIN, 0)])
    plant = Actions.of(episodes.population.space, 1, op=int(LifecycleOp.GERMINATE))
    for _ in range(EPOCHS_ALONE):
        assert episodes.population.legal().masks["op"][0].tolist() == [True] + [False] * 4
        with pytest.raises(GateRefusedError, match=f"at least {EPOCHS_ALONE} needed"):
            episodes.population.apply(plant)
        live_on(episodes, 1)
    assert len(episodes.population.apply(plant)) > 0


def test_what_does_not_belong_to_the_episodes_is_refused() -> None:
    episodes = make_episodes(1)
    other = replace(PLAIN, name="other", source=replace(PLAIN.source, seed=9))
    with pytest.raises(UnknownNameError, match="context of these episodes; given: 'other'"):
        episodes.begin(torch.tensor([0]), [Case(other, 0)])
    wide = replace(PLAIN, name="wide", host_sizes=(("width", 24),))
    with pytest.raises(AgreementError, match="hosts of one shape"):
        Episodes([PLAIN, wide], 1)
    with pytest.raises(AgreementError, match="need contexts"):
        Episodes([], 1)
    assert by_shape([PLAIN, wide, LESION]) == [[PLAIN, LESION], [wide]]


def test_the_catalogue_of_a_context_is_that_of_its_episodes() -> None:
    assert PLAIN.catalogue() == make_episodes(1).population.catalogue


# --- what an epoch measures in one pass is what attribution and evaluation measure apart -------

ROWS = 24


@pytest.fixture(scope="module")
def grown() -> Garden:
    """Rows with none, one and several seeds, in every stage."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.garden.episodes.GARDEN_BATCHES", 5)
        garden = make_garden(ROWS, horizon=12)
        garden.reset()
        walk(garden, 9, RandomLegal(rate=0.9))
    return garden


@pytest.mark.slow
def test_measurements_agree_with_attribution_and_evaluation(grown: Garden) -> None:
    population = grown.population
    found = measure(population)
    on = population.lifecycle.alpha > 0
    assert int((on.sum(1) > 1).sum()) >= 3, "some rows need several seeds"
    assert bool(population.lifecycle.at(SeedStage.FOSSILIZED).any())
    assert torch.equal(found.contribution.isnan(), ~on)
    contributions = torch.stack([leave_one_out(population, n) for n in range(len(population))])
    torch.testing.assert_close(found.contribution, contributions, rtol=0, atol=1e-9, equal_nan=True)
    whole, committed = population.evaluate(), population.evaluate(committed=True)
    torch.testing.assert_close(found.whole.accuracy, whole.accuracy, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.whole.loss, whole.loss, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.committed, committed.accuracy, rtol=0, atol=1e-9)
    assert bool((found.committed != found.whole.accuracy)[uncommitted(population).any(1)].any())


def test_without_attribution_nothing_is_said_of_seeds(grown: Garden) -> None:
    found = measure(grown.population, attribute=False)
    assert bool(found.contribution.isnan().all())
    whole = grown.population.evaluate()
    torch.testing.assert_close(found.whole.accuracy, whole.accuracy, rtol=0, atol=1e-9)


def test_rows_that_idle_are_scored_but_not_asked_about_their_seeds() -> None:
    garden = make_garden(2)
    garden.reset()
    population = garden.population
    plant = Actions.of(
        population.space, 2, op=int(LifecycleOp.GERMINATE), blend=int(Blend.IMMEDIATE)
    )
    walk(garden, EPOCHS_ALONE, NeverGrow())
    garden.step(plant)
    population.freeze_rows(torch.tensor([1]))
    found = measure(population)
    assert found.contribution[:, 0].isnan().tolist() == [False, True]
    assert bool(found.committed.isfinite().all())
