"""What an epoch measures in one pass is what attribution and evaluation measure apart."""

import pytest
import torch

from esper.garden import Garden
from esper.garden.attribution import leave_one_out
from esper.garden.episodes import EPOCHS_ALONE, measure, uncommitted
from esper.leyline import Actions, Blend, LifecycleOp, SeedStage
from esper.tamiyo.controllers import NeverGrow, RandomLegal
from tests.garden.plots import make_garden, walk

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


def test_measurements_agree_with_attribution_and_evaluation(grown: Garden) -> None:
    population = grown.population
    found = measure(population)
    on = population.lifecycle.alpha > 0
    assert int((on.sum(1) > 1).sum()) >= 3, "some rows need several seeds"
    assert bool(population.lifecycle.at(SeedStage.FOSSILIZED).any())
    assert torch.equal(found.contribution.isnan(), ~on)
    torch.testing.assert_close(
        found.contribution, leave_one_out(population), rtol=0, atol=1e-9, equal_nan=True
    )
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
