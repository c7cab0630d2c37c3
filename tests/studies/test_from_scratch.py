"""Architectures from scratch: the parts are there from the first step, started as asked for."""

import math

import pytest
import torch

from esper.garden import Case, Episodes, find_suite
from esper.leyline import AgreementError
from esper.leyline.ops import Blend
from esper.leyline.stages import SeedStage
from esper.tolaria import extract
from esper.tolaria.plan import HOST
from studies.fixed import GrownPart, Start, plant_grown

SUITE = find_suite("garden")
CONTEXT = SUITE.find("mnist1d-4000")
ROWS = torch.arange(3)


@pytest.fixture(autouse=True)
def _short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.garden.episodes.GARDEN_BATCHES", 2)


def episodes_with(start: Start | None, *names: str, blend: Blend = Blend.IMMEDIATE) -> Episodes:
    """Three rows; the second and third have the named seeds, one slot after the other."""
    episodes = Episodes([CONTEXT], len(ROWS))
    episodes.begin(ROWS, [Case(CONTEXT, seed) for seed in range(len(ROWS))])
    if start is not None:
        catalogue = episodes.population.catalogue
        parts = [GrownPart(slot, catalogue.index(name), blend) for slot, name in enumerate(names)]
        plant_grown(episodes.population, ROWS[1:], parts, start)
    return episodes


@pytest.mark.slow
@pytest.mark.parametrize("start", list(Start))
@pytest.mark.parametrize("name", ["norm", "squeeze", "conv", "token_mix", "attention"])
def test_the_parts_act_from_the_beginning_or_add_nothing_yet(start: Start, name: str) -> None:
    bare = episodes_with(None).population.evaluate().loss
    grown = episodes_with(start, name).population.evaluate().loss
    assert torch.equal(bare[:1], grown[:1]), "the first row has no seed"
    assert bool((bare[1:] == grown[1:]).all()) == (start is Start.ZERO)


def test_the_last_layer_starts_as_torch_would_start_it_and_hosts_as_ever() -> None:
    episodes, bare = episodes_with(Start.USUAL, "conv"), episodes_with(None)
    population = episodes.population
    key = ("seed", 0, population.catalogue.index("conv"))
    pool = population.pools[key]
    rows = pool.state.theta[pool.rows_in_use]
    weights = pool.template.views(rows)
    bound = 1 / math.sqrt(8 * 5)
    for name in ("0.weight", "2.weight"):
        values = weights[name]
        assert float(values.abs().max()) <= bound
        assert float(values.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert not torch.equal(rows[0], rows[1]), "each environment draws its own"
    hosts = [each.population.pools[HOST].state.theta for each in (episodes, bare)]
    assert torch.equal(*hosts)


def test_the_network_is_the_plain_one_that_export_would_give() -> None:
    episodes = episodes_with(Start.USUAL, "norm", "conv", blend=Blend.GATE)
    episodes.train_epoch()
    episodes.population.pass_time()
    model = extract(episodes.population, 2)
    test = CONTEXT.source.load().test
    with torch.no_grad():
        right = (model(test.inputs).argmax(-1) == test.labels).double().mean()
    found = episodes.population.evaluate("test", committed=True).accuracy[2]
    assert float(found) == pytest.approx(100 * float(right), abs=0.1)
    stages = episodes.population.lifecycle.stage
    assert stages[1:, :2].eq(SeedStage.FOSSILIZED).all()
    assert stages[0].eq(SeedStage.DORMANT).all()


def test_seeds_from_scratch_learn_and_count_as_parameters() -> None:
    episodes = episodes_with(Start.ZERO, "conv")
    before = episodes.population.pools["seed", 0, episodes.population.catalogue.index("conv")]
    theta = before.state.theta.clone()
    episodes.train_epoch()
    moved = (before.state.theta != theta).any(1)
    assert moved[before.rows_in_use].all()
    cost = episodes.population.catalogue.costs[0][episodes.population.catalogue.index("conv")]
    assert episodes.population.lifecycle.params[:, 0].tolist() == [0, cost, cost]


def test_an_environment_that_has_trained_is_refused() -> None:
    episodes = episodes_with(None)
    episodes.train_epoch()
    episodes.population.pass_time()
    with pytest.raises(AgreementError, match="before it trains"):
        plant_grown(episodes.population, ROWS, [GrownPart(0, 0, Blend.RAMP)], Start.USUAL)
