"""Plans of fixed size give what plans of exact size give; CUDA graphs are tested where possible."""

import gc
from collections.abc import Iterator

import pytest
import torch

from esper.tolaria.cuda_graphs import Padding, uncollected
from esper.tolaria.engine import TrainingStep
from esper.tolaria.feed import Augmentation
from esper.tolaria.plan import HOST, StepPlan
from tests.tolaria.test_population import own_draws
from tests.tolaria.twins import EVERY_HOST, HOSTS, draw_actions, make_population


@pytest.mark.parametrize("host", list(EVERY_HOST))
@pytest.mark.parametrize("isolation", ["dual_pass", "straight_through"])
def test_padding_a_plan_changes_no_gradient_and_teaches_no_spare_row(
    host: str, isolation: str
) -> None:
    population = make_population(host, 9, batches=1, isolation=isolation)
    padding = Padding(population.pools, grain=4)
    for epoch in range(5):
        population.apply(draw_actions(population.legal(), own_draws(population, epoch)))
        exact = population.training_step()
        wider = padding.pad_both(exact.plan)
        learners = dict(exact.plan.learners)
        for key in wider.isolated.pool_keys() if wider.isolated is not None else []:
            learners.setdefault(key, torch.zeros_like(population.pools[key].state.active))
        padded = TrainingStep(population, wider._replace(learners=learners))
        batch = population.feed.fetch(
            population.feed.epoch(population.seeds, population.lifecycle.epoch)[0]
        )
        losses, grads = exact.gradients(*batch)
        other_losses, other_grads = padded.gradients(*batch)
        torch.testing.assert_close(losses, other_losses, rtol=1e-12, atol=1e-14)
        for key, grad in other_grads.items():
            expected = grads.get(key, torch.zeros_like(grad))
            torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-13)
            if key != HOST:
                assert bool((grad[-1] == 0).all()), "the spare row learns nothing"
        population.train_epoch()
        population.pass_time()


def test_a_sick_environment_does_not_reach_others_through_padding() -> None:
    population = make_population("conv1d", 5)
    for epoch in range(3):
        population.apply(draw_actions(population.legal(), own_draws(population, epoch), eager=1.0))
        population.train_epoch()
        population.pass_time()
    exact = population.training_step()
    wider = Padding(population.pools, grain=4).pad("training", exact.plan.training)
    padded = TrainingStep(population, StepPlan(wider, {}))
    batch = population.feed.fetch(
        population.feed.epoch(population.seeds, population.lifecycle.epoch)[0]
    )
    healthy, before = padded.gradients(*batch)
    population.pools[HOST].state.theta[0] = torch.nan  # padding points at environment 0
    sick, after = padded.gradients(*batch)
    assert bool(sick[0].isnan())
    assert torch.equal(sick[1:], healthy[1:])
    for key, grad in after.items():
        owners = population.pools[key].owner
        spared = (owners > 0).nonzero()[:, 0]
        assert torch.equal(grad[spared], before[key][spared])


@pytest.fixture(params=[True, False], ids=["collecting", "not collecting"])
def collecting(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the collector is on before; afterwards it is as the tests had it."""
    found = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if found else gc.disable)()


def test_nothing_is_collected_meanwhile_and_the_collector_is_left_as_it_was(
    collecting: bool,
) -> None:
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled(), "what is inside does not switch it on for what is around"
    assert gc.isenabled() == collecting


def test_the_collector_is_left_as_it_was_when_something_goes_wrong(collecting: bool) -> None:
    with pytest.raises(ZeroDivisionError), uncollected():
        _ = 1 / 0
    assert gc.isenabled() == collecting


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("host", list(HOSTS))
@pytest.mark.parametrize("isolation", ["dual_pass", "straight_through"])
def test_replaying_a_graph_equals_running_step_by_step(host: str, isolation: str) -> None:
    graphed, eager = (
        make_population(host, 9, isolation=isolation, device="cuda", graphs=graphs)
        for graphs in (True, False)
    )
    for epoch in range(8):
        actions = draw_actions(graphed.legal(), own_draws(graphed, epoch))
        for population in (graphed, eager):
            population.apply(actions)
        mine, theirs = graphed.train_epoch(), eager.train_epoch()
        torch.testing.assert_close(mine.loss, theirs.loss, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(
            mine.seed_gradient, theirs.seed_gradient, rtol=1e-8, atol=1e-12, equal_nan=True
        )
        for population in (graphed, eager):
            population.pass_time()
    for key, pool in graphed.pools.items():
        rows = pool.rows_in_use
        torch.testing.assert_close(
            pool.state.theta[rows], eager.pools[key].state.theta[rows], rtol=1e-9, atol=1e-11
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("host", list(HOSTS))
def test_a_deterministic_run_on_cuda_repeats_to_the_bit(host: str) -> None:
    def run() -> list[torch.Tensor]:
        population = make_population(
            host, 9, device="cuda", dtype=torch.float32, deterministic=True
        )
        for epoch in range(6):
            population.apply(draw_actions(population.legal(), own_draws(population, epoch)))
            population.train_epoch()
            population.pass_time()
        return [pool.state.theta[pool.rows_in_use].clone() for pool in population.pools.values()]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_capturing_a_graph_does_not_shift_the_augmentation() -> None:
    def moments(graphs: bool) -> list[torch.Tensor]:
        population = make_population("conv2d", 4, device="cuda", graphs=graphs)
        population.feed.augmentation = Augmentation(shift=1, flip=True)
        losses = []
        for epoch in range(3):
            population.apply(draw_actions(population.legal(), own_draws(population, epoch)))
            losses.append(population.train_epoch().loss)
            population.pass_time()
        return losses

    for mine, theirs in zip(moments(True), moments(False), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
