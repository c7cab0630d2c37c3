"""Environments as values: snapshots, copies, restarts."""

import pytest
import torch

from esper.leyline import (
    Actions,
    AgreementError,
    GateRefusedError,
    SeedStage,
)
from esper.tolaria.plan import HOST
from esper.tolaria.population import Population, extract
from tests.tolaria.test_population import own_draws
from tests.tolaria.twins import HOSTS, Twins, draw_actions, make_population

each_host = pytest.mark.parametrize("host", list(HOSTS))


def live(population: Population, epochs: range) -> list[torch.Tensor]:
    losses = []
    for epoch in epochs:
        population.apply(draw_actions(population.legal(), own_draws(population, epoch)))
        losses.append(population.train_epoch().loss)
        population.pass_time()
    return losses


def weights(population: Population, environment: int) -> dict[str, torch.Tensor]:
    return extract(population, environment).state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


@each_host
def test_an_environment_put_back_is_what_it_was_and_no_other_changes(host: str) -> None:
    population = make_population(host, 6)
    live(population, range(3))
    snapshot = population.snapshot()
    before = [weights(population, index) for index in range(6)]
    live(population, range(3, 6))
    after = [weights(population, index) for index in range(6)]
    population.put_rows(torch.tensor([1, 4]), snapshot)
    for index in range(6):
        expected = before if index in (1, 4) else after
        assert same(weights(population, index), expected[index])
    assert population.lifecycle.epoch.tolist() == [6, 3, 6, 6, 3, 6]


@each_host
def test_an_environment_put_back_lives_the_same_life_again(host: str) -> None:
    population = make_population(host, 4)
    live(population, range(3))
    snapshot = population.snapshot()
    first = torch.stack(live(population, range(3, 6)))
    population.put_rows(torch.arange(4), snapshot)
    second = torch.stack(live(population, range(3, 6)))
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-13)


def test_a_copy_has_the_weights_of_its_source_and_the_streams_of_its_place() -> None:
    population = make_population("mlp", 4)
    live(population, range(3))
    population.put_rows(torch.tensor([0]), population.snapshot(), torch.tensor([2]))
    assert same(weights(population, 0), weights(population, 2))
    population.train_epoch()
    assert not same(weights(population, 0), weights(population, 2))
    with pytest.raises(AgreementError, match="one source"):
        population.put_rows(torch.tensor([1, 1]), population.snapshot())


@each_host
def test_a_restarted_environment_is_a_new_one_while_others_go_on(host: str) -> None:
    population = make_population(host, 4)
    live(population, range(4))
    kept = [weights(population, index) for index in (0, 1, 3)]
    population.reset_rows(torch.tensor([2]), [6])
    assert population.lifecycle.stage[2].tolist() == [SeedStage.DORMANT] * 3
    assert int(population.lifecycle.epoch[2]) == 0
    for index, expected in zip((0, 1, 3), kept, strict=True):
        assert same(weights(population, index), expected)
    fresh = make_population(host, 1, first=6)
    assert same(weights(population, 2), weights(fresh, 0))
    population.train_epoch()
    fresh.train_epoch()
    for name, value in weights(fresh, 0).items():
        torch.testing.assert_close(weights(population, 2)[name], value, rtol=1e-9, atol=1e-11)


def test_frozen_environments_keep_every_bit_while_others_train() -> None:
    population = make_population("conv1d", 5)
    live(population, range(3))
    before = [weights(population, index) for index in range(5)]
    population.freeze_rows(torch.tensor([0, 3]))
    population.train_epoch()
    for index in range(5):
        assert same(weights(population, index), before[index]) == (index in (0, 3))


def test_every_environment_may_have_rates_of_its_own() -> None:
    population = make_population("mlp", 3, rate=0.01)
    live(population, range(2))
    rates = torch.tensor([0.0, 0.005, 0.02], dtype=torch.float64)
    population.set_rates(torch.arange(3), rate=rates, decay=0.1)
    twins = Twins(population)
    for host, optimizer, rate in zip(twins.hosts, twins.optimizers, rates.tolist(), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("learning_rate_scale", 1.0)
            group["weight_decay"] = 0.1
        optimizer.state.clear()
        assert host.training
    for pool in population.pools.values():  # as fresh as the twins' optimisers
        for moment in pool.state.moments:
            moment.zero_()
        pool.state.steps.zero_()
    before = weights(population, 0)
    losses, _, _ = twins.epoch()
    torch.testing.assert_close(population.train_epoch().loss, losses, rtol=1e-9, atol=0)
    assert same(weights(population, 0), before), "a rate of zero moves nothing"
    assert twins.difference() < 1e-9


def test_rows_of_removed_seeds_are_used_again() -> None:
    population = make_population("mlp", 8)
    live(population, range(40))
    for key, pool in population.pools.items():
        if key != HOST:
            assert pool.capacity <= 16
            held = pool.rows_in_use
            assert len(held) <= 8
            assert bool(pool.state.active[held].all())
            assert int(pool.state.active.sum()) == len(held)


def test_environments_are_restarted_in_place_whatever_their_order() -> None:
    population = make_population("mlp", 6)
    live(population, range(3))
    population.reset_rows(torch.tensor([5, 2]), [15, 12])
    assert population.pools[HOST].owner.tolist() == list(range(6))
    for index, identity in ((5, 15), (2, 12)):
        fresh = make_population("mlp", 1, first=identity)
        assert same(weights(population, index), weights(fresh, 0))
    for wrong in ((torch.tensor([2, 2]), [1, 2]), (torch.tensor([2, 3]), [1])):
        with pytest.raises(AgreementError, match="one identity"):
            population.reset_rows(*wrong)


def test_a_frozen_environment_may_only_wait() -> None:
    population = make_population("mlp", 3)
    population.freeze_rows(torch.tensor([1]))
    ops = population.legal().masks["op"]
    assert ops[1].tolist() == [True, False, False, False, False]
    assert bool(ops[0, 1])
    with pytest.raises(GateRefusedError, match=r"in host 1 is refused.* host now: WAIT\."):
        population.apply(Actions.of(population.space, 3, op=1))
    population.reset_rows(torch.tensor([1]), [4])
    assert population.apply(Actions.of(population.space, 3, op=1))


def test_a_copy_takes_over_rates_and_budget() -> None:
    population = make_population("mlp", 2)
    population.set_rates(torch.tensor([0]), rate=0.5)
    population.budget[0] = 77
    population.put_rows(torch.tensor([1]), population.snapshot(), torch.tensor([0]))
    assert population.rate.tolist() == [0.5, 0.5]
    assert population.budget.tolist() == [77, 77]
