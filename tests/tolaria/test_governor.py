"""Faults in one environment: found, undone, treated, and never felt by another."""

import copy
import os

import pytest
import torch

from esper.leyline import EsperError, SeedStage
from esper.leyline.streams import derive_seed
from esper.tolaria.governor import Failure, Governor, Remedy
from esper.tolaria.plan import HOST
from esper.tolaria.population import Population, extract
from tests.tolaria.test_population import own_draws
from tests.tolaria.twins import HOSTS, draw_actions, make_population

FAULTS = int(os.environ.get("ESPER_FAULTS", "30"))
VALUES = {"nan": float("nan"), "inf": float("inf"), "1e30": 1e30}
PLACES = ("weights", "gradient", "batch", "optimiser")


def grow(population: Population, epochs: int) -> None:
    for epoch in range(epochs):
        population.apply(draw_actions(population.legal(), own_draws(population, epoch)))
        population.train_epoch()
        population.pass_time()


class Fault:
    """A number written where it does not belong, in one environment, before one batch."""

    def __init__(self, population: Population, draw: torch.Generator) -> None:
        def pick(count: int) -> int:
            return int(torch.randint(count, (1,), generator=draw))

        self.population = population
        self.environment = pick(len(population))
        self.at = pick(population.feed.batches)
        self.value = list(VALUES.values())[pick(len(VALUES))]
        self.place = PLACES[pick(len(PLACES))]
        homes = [
            (key, int(row))
            for key, pool in population.pools.items()
            for row in (pool.owner == self.environment).nonzero()[:, 0]
        ]
        self.key, self.row = homes[pick(len(homes))]
        self.column = pick(population.pools[self.key].template.width)
        self.count = 0

    def strike(self, gradients):  # type: ignore[no-untyped-def]
        """Wraps the computation of one batch's gradients."""

        def struck(inputs: torch.Tensor, labels: torch.Tensor):  # type: ignore[no-untyped-def]
            now = self.count == self.at
            self.count += 1
            state = self.population.pools[self.key].state
            if now and self.place == "weights":
                state.theta[self.row, self.column] = self.value
            if now and self.place == "optimiser":
                state.moments[-1][self.row, self.column] = self.value
            if now and self.place == "batch":
                inputs = inputs.clone()
                inputs[self.environment].view(-1)[0] = self.value
            losses, grads = gradients(inputs, labels)
            if now and self.place == "gradient":
                grads[self.key][self.row, self.column] = self.value
            return losses, grads

        return struck


@pytest.mark.parametrize("host", list(HOSTS))
def test_faults_are_undone_and_no_other_environment_notices(host: str) -> None:
    draw = torch.Generator().manual_seed(derive_seed("faults", host))
    healthy = make_population(host, 4)
    grow(healthy, 2)
    for _ in range(max(1, FAULTS // len(HOSTS))):
        struck, calm = copy.deepcopy(healthy), copy.deepcopy(healthy)
        governors = [Governor(each) for each in (struck, calm)]
        fault = Fault(struck, draw)
        entering = extract(struck, fault.environment).state_dict()
        for governor in governors:
            governor.enter_epoch()
        step = struck.training_step()
        step.gradients = fault.strike(step.gradients)  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(struck, "training_step", lambda step=step: step)
            record = struck.train_epoch()
        trips = governors[0].leave_epoch(record, struck.evaluate())
        assert not governors[1].leave_epoch(calm.train_epoch(), calm.evaluate())
        for pool in struck.pools.values():
            rows = pool.rows_in_use
            assert bool(pool.state.theta[rows].isfinite().all())
            assert all(bool(moment[rows].isfinite().all()) for moment in pool.state.moments)
        for index in range(4):
            mine, theirs = extract(struck, index).state_dict(), extract(calm, index).state_dict()
            if index != fault.environment:
                assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
            elif trips:
                assert all(torch.equal(mine[name], entering[name]) for name in entering)
        assert all(trip.environment == fault.environment for trip in trips)
        # A wild number in the data may die in a ReLU; anywhere else it must be found.
        assert trips or fault.place == "batch", f"{fault.value} in {fault.place} was missed"
        for population in (struck, calm):
            population.pass_time()
            population.train_epoch()
        for index in range(4):
            if index != fault.environment:
                mine, theirs = (extract(p, index).state_dict() for p in (struck, calm))
                for name, value in theirs.items():
                    torch.testing.assert_close(mine[name], value, rtol=1e-9, atol=1e-11)


def test_the_ladder_goes_from_skip_through_prune_to_freeze() -> None:
    population = make_population("mlp", 3)
    grow(population, 2)
    assert bool((population.lifecycle.stage[1] != SeedStage.DORMANT).any())
    governor = Governor(population)
    remedies = []
    for _ in range(4):
        governor.enter_epoch()
        record = population.train_epoch()
        population.pools[HOST].state.theta[1] = torch.nan
        trips = governor.leave_epoch(record)
        remedies += [trip.remedy for trip in trips]
        population.pass_time()
    assert remedies == [Remedy.SKIP, Remedy.PRUNE, Remedy.FREEZE]
    assert not bool(population.lifecycle.at(SeedStage.TRAINING, SeedStage.HOLDING)[1].any())
    assert not bool(population.pools[HOST].state.active[1])


def test_every_cause_is_named_with_its_numbers() -> None:
    population = make_population("mlp", 4)
    governor = Governor(population)
    for _ in range(3):
        governor.enter_epoch()
        assert not governor.leave_epoch(population.train_epoch(), population.evaluate())
    governor.enter_epoch()
    record, scores = population.train_epoch(), population.evaluate()
    record.loss[0] = torch.nan
    record.loss[1] = 40.0 * governor.losses[1].nanmedian()
    governor.best[2] = 90.0
    scores.accuracy[2] = 25.5
    population.pools[HOST].squares[3] = torch.inf
    trips = {trip.environment: trip for trip in governor.leave_epoch(record, scores)}
    assert [trips[index].cause for index in range(4)] == [
        Failure.NON_FINITE_LOSS,
        Failure.EXPLOSION,
        Failure.COLLAPSE,
        Failure.NON_FINITE_GRADIENT,
    ]
    assert trips[1].value > trips[1].limit
    assert "collapse to chance (25.5, limit 27)" in str(trips[2])


def test_a_healthy_population_never_trips() -> None:
    population = make_population("conv1d", 6, rate=0.003)
    governor = Governor(population)
    for epoch in range(10):
        population.apply(draw_actions(population.legal(), own_draws(population, epoch)))
        governor.enter_epoch()
        assert not governor.leave_epoch(population.train_epoch(), population.evaluate())
        population.pass_time()


def test_wrong_use_gets_a_sentence() -> None:
    population = make_population("mlp", 2)
    with pytest.raises(EsperError, match="enter_epoch"):
        Governor(population).leave_epoch(population.train_epoch())


def test_a_restarted_environment_has_no_past() -> None:
    population = make_population("mlp", 3)
    governor = Governor(population)
    governor.losses[:] = 0.01  # it had learned its task
    governor.best[:] = 99.0
    governor.trips[:] = 2
    population.reset_rows(torch.tensor([2, 0]), [12, 10])
    governor.enter_epoch()
    record, scores = population.train_epoch(), population.evaluate()
    tripped = {trip.environment for trip in governor.leave_epoch(record, scores)}
    assert tripped == {1}, "only the one that was not restarted exploded and collapsed"
    assert governor.trips.tolist() == [0, 3, 0]


def test_a_row_that_is_reset_within_an_epoch_is_not_put_back_to_its_old_life() -> None:
    population = make_population("mlp", 2)
    governor = Governor(population)
    governor.enter_epoch()
    record = population.train_epoch()
    population.reset_rows(torch.tensor([1]), [9])
    fresh = extract(population, 1).state_dict()
    record.loss[1] = torch.nan
    assert not governor.leave_epoch(record)
    assert all(torch.equal(v, fresh[k]) for k, v in extract(population, 1).state_dict().items())


def test_a_small_loss_may_grow_without_alarm() -> None:
    population = make_population("mlp", 1)
    governor = Governor(population)
    governor.losses[:] = 1e-4
    high = torch.ones(len(governor.losses), dtype=torch.float64)
    assert float(governor._loss_limit(high)[0]) == pytest.approx(0.5001)
