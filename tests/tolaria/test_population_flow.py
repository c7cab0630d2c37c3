"""What flows past the slots of a population, row by row, as each host alone would show it.

Shapes: `N` environments, `S` slots, `K` statistics.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.flow_statistics import flow_statistics
from esper.leyline import Actions, Blend, LifecycleOp
from esper.leyline.signals import FLOW_STATISTICS
from esper.tolaria.feed import Feed
from esper.tolaria.plan import HOST
from esper.tolaria.population import Population, extract
from tests.tolaria.test_population import own_draws
from tests.tolaria.twins import HOSTS, draw_actions, make_population, make_splits

each_host = pytest.mark.parametrize("host", list(HOSTS))
ROUGHNESS = FLOW_STATISTICS.index("roughness")


def grown(host: str, count: int, epochs: int = 5, **settings: object) -> Population:
    """A population whose rows have all kinds of seeds, each by its own chance."""
    population = make_population(host, count, **settings)  # type: ignore[arg-type]
    for epoch in range(epochs):
        population.apply(draw_actions(population.legal(), own_draws(population, epoch)))
        population.train_epoch()
        population.pass_time()
    return population


def planted(population: Population, blend: Blend) -> None:
    """The first blueprint in the first slot, in every row."""
    population.apply(
        Actions.of(
            population.legal().space, len(population), op=LifecycleOp.GERMINATE, blend=int(blend)
        )
    )


def reference_flow(population: Population, row: int, inputs: Tensor) -> Tensor:
    """[S, K]: of the row's own host, from what leaves its segments before any seed acts there."""
    host = extract(population, row).eval()
    found: list[Tensor] = []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        axis = host.specs[len(found)].channel_axis
        found.append(flow_statistics(output[None], axis)[0])

    segments = host.model.segments
    assert isinstance(segments, nn.ModuleList)
    for segment in list(segments)[: len(host.specs)]:
        segment.register_forward_hook(look, prepend=True)
    with torch.no_grad():
        host(inputs)
    assert len(found) == len(host.specs)
    return torch.stack(found).double()


@each_host
@pytest.mark.parametrize("samples", [7, 1000])
def test_it_is_that_of_every_rows_own_host(
    host: str, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.tolaria.population.FLOW_SAMPLES", samples)
    population = grown(host, 9)
    assert bool((population.lifecycle.alpha > 0).any()), "seeds act"
    flow = population.flow()
    assert flow.shape == (9, len(population.specs), len(FLOW_STATISTICS))
    assert flow.dtype == torch.float64
    for row in range(9):
        inputs = make_splits(host, row % 2).validation.inputs[:samples]
        expected = reference_flow(population, row, inputs)
        torch.testing.assert_close(flow[row], expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    unknown = flow.isnan()
    assert bool(unknown[..., ROUGHNESS].any()) == (host != "conv1d"), (
        "where there is one place only"
    )
    unknown[..., ROUGHNESS] = False
    assert not bool(unknown.any())


@each_host
def test_a_row_flows_the_same_whoever_is_beside_it(host: str) -> None:
    many, few = grown(host, 9).flow(), grown(host, 5).flow()
    torch.testing.assert_close(many[:5], few, rtol=0, atol=1e-6, equal_nan=True)
    assert len(many.flatten(1).nan_to_num().unique(dim=0)) == 9, "every row has a flow of its own"


def test_it_is_measured_on_validation_data_and_nothing_else() -> None:
    population = grown("conv1d", 4)
    before = population.flow()
    feed = population.feed
    for split in ("train", "test"):
        feed._data[split].inputs.fill_(torch.nan)
    for _, labels in feed._data.values():
        labels.fill_(0)
    assert torch.equal(population.flow(), before)
    feed._data["validation"].inputs.mul_(2).add_(1)
    assert not torch.isclose(population.flow(), before).any(dim=2).all()


def test_measuring_it_changes_nothing() -> None:
    looked, left = grown("conv2d", 4), grown("conv2d", 4)
    torch.testing.assert_close(looked.flow(), looked.flow(), rtol=0, atol=0, equal_nan=True)
    assert not looked.flow().requires_grad
    for population in (looked, left):
        population.train_epoch()
    for key, pool in looked.pools.items():
        rows = pool.rows_in_use
        assert torch.equal(pool.state.theta[rows], left.pools[key].state.theta[rows])


@each_host
def test_a_seed_that_acts_shows_at_the_slots_after_it_and_in_its_own_row_only(host: str) -> None:
    population = make_population(host, 4)
    alone = population.flow()
    planted(population, Blend.IMMEDIATE)
    torch.testing.assert_close(population.flow(), alone, equal_nan=True)  # at its zero point
    row, kind = 2, int(population.lifecycle.blueprint[2, 0])
    pool = population.pools["seed", 0, kind]
    pool.state.theta[int(population.pool_rows[row, 0])] += 0.5
    after = population.flow()
    same = torch.isclose(after, alone, rtol=1e-6, atol=1e-6, equal_nan=True).all(2)  # [N, S]
    expected = torch.ones_like(same)
    expected[row, 1:] = False
    assert torch.equal(same, expected)


def test_a_seed_in_isolation_does_not_show() -> None:
    population = make_population("conv1d", 4)
    alone = population.flow()
    planted(population, Blend.RAMP)
    for key, pool in population.pools.items():
        if key != HOST:
            pool.state.theta += 0.5
    torch.testing.assert_close(population.flow(), alone)


# --- the samples it looks at ---------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("count", [1, 7, 30])
def test_the_first_samples_are_those_of_each_environments_own_data(split: str, count: int) -> None:
    datasets = [make_splits("mlp", seed) for seed in (0, 1, 2)]
    assignment = [2, 0, 1, 2]
    feed = Feed(datasets, assignment, dtype=torch.float64)
    found = feed.first_samples(split, count)
    expected = [datasets[place].named()[split].inputs[:count] for place in assignment]
    assert torch.equal(found, torch.stack(expected))
    feed.assign(torch.tensor([3]), torch.tensor([1]))
    expected[3] = expected[2]
    assert torch.equal(feed.first_samples(split, count), torch.stack(expected))


def test_where_there_are_fewer_samples_all_are_taken_and_none_of_the_neighbours() -> None:
    datasets = [make_splits("mlp", 0, samples=12), make_splits("mlp", 1, samples=40)]
    feed = Feed(datasets, [0, 1, 0], dtype=torch.float64)
    assert feed.first_samples("validation", 1000).shape == (3, 30, 12)
    train = feed.first_samples("train", 1000)
    expected = [datasets[place].train.inputs[:12] for place in (0, 1, 0)]
    assert torch.equal(train, torch.stack(expected))
