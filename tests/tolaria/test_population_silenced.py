"""Hosts with silenced weights, and rows whose data or task changes, inside one population."""

import pytest
import torch
from torch import Tensor

from esper.garden import Lesion, lesion_mask
from esper.leyline import AgreementError, DataError
from esper.tolaria.governor import Governor
from esper.tolaria.plan import HOST
from esper.tolaria.population import Population, extract
from tests.tolaria.test_population import own_draws
from tests.tolaria.twins import HOSTS, Twins, draw_actions, make_population

LESIONS = {
    "mlp": [Lesion(kind="narrow", stage=1), Lesion(kind="narrow", stage=2)],
    "conv1d": [Lesion(kind="narrow", stage=0), Lesion(kind="tap", stage=1)],
}
SILENCED = torch.tensor([1, 3])
each_host = pytest.mark.parametrize("host", list(LESIONS))


def lesioned(host: str, count: int = 5, **settings: object) -> Population:
    """Rows 1 and 3 have a lesion each, the others are whole."""
    population = make_population(host, count, **settings)  # type: ignore[arg-type]
    masks = [lesion_mask(HOSTS[host](), lesion) for lesion in LESIONS[host]]
    population.silence_rows(SILENCED, torch.stack(masks))
    return population


def dead(population: Population) -> Tensor:
    """[N, P] bool"""
    assert population.live is not None
    return ~population.live


def weights_of(population: Population) -> Tensor:
    return population.pools[HOST].state.theta[:-1]


def live_on(population: Population, epochs: range) -> Tensor:
    losses = []
    for epoch in epochs:
        population.apply(draw_actions(population.legal(), own_draws(population, epoch)))
        losses.append(population.train_epoch().loss)
        population.pass_time()
    return torch.stack(losses)


@each_host
def test_silenced_hosts_train_as_reference_hosts_with_masked_gradients(host: str) -> None:
    population = lesioned(host, rate=0.01, decay=0.02)
    twins = Twins(population)
    assert population.live is not None
    for row, model in enumerate(twins.hosts):
        parts = population.engine.templates[HOST].views(population.live[row : row + 1])
        for name, parameter in model.named_parameters():
            if name.startswith("model."):
                live = parts[name.removeprefix("model.")][0]
                parameter.register_hook(lambda grad, live=live: grad * live)
    for epoch in range(6):
        twins.apply(draw_actions(population.legal(), own_draws(population, epoch)))
        losses, _, scores = twins.epoch()
        record = population.train_epoch()
        torch.testing.assert_close(record.loss, losses, rtol=1e-9, atol=1e-12)
        found = population.evaluate().accuracy
        torch.testing.assert_close(found, scores.double(), rtol=0, atol=1e-5)
        assert bool((weights_of(population)[dead(population)] == 0).all())
        population.pass_time()
        for model in twins.hosts:
            model.pass_time()
    assert twins.difference() < 1e-9
    assert int(dead(population)[SILENCED].sum(1).min()) > 0
    assert not bool(dead(population)[[0, 2, 4]].any())


@each_host
def test_whole_rows_do_not_notice_silenced_neighbours(host: str) -> None:
    mixed, whole = lesioned(host), make_population(host, 5)
    ours, theirs = live_on(mixed, range(4)), live_on(whole, range(4))
    others = [0, 2, 4]
    torch.testing.assert_close(ours[:, others], theirs[:, others], rtol=1e-12, atol=1e-12)
    assert not torch.equal(ours[:, SILENCED], theirs[:, SILENCED])


@each_host
def test_rows_that_are_put_back_or_copied_bring_their_silence_along(host: str) -> None:
    population = lesioned(host)
    live_on(population, range(2))
    snapshot, before = population.snapshot(), weights_of(population).clone()
    live_on(population, range(2, 4))
    population.put_rows(torch.tensor([0, 3]), snapshot)
    assert torch.equal(weights_of(population)[[0, 3]], before[[0, 3]])
    masks = dead(population).clone()
    population.put_rows(torch.tensor([0, 1]), snapshot, torch.tensor([3, 2]))  # and swapped
    assert torch.equal(dead(population)[0], masks[3])
    assert not bool(dead(population)[1].any()), "row 1 is a copy of a whole host now"
    live_on(population, range(4, 6))
    assert bool((weights_of(population)[dead(population)] == 0).all())
    assert bool((weights_of(population)[1] != 0).all())


def test_a_failed_row_is_put_back_with_its_silence() -> None:
    population = lesioned("mlp")
    live_on(population, range(2))
    governor, before = Governor(population), weights_of(population).clone()
    governor.enter_epoch()
    record = population.train_epoch()
    weights_of(population)[3] = torch.nan
    assert [trip.environment for trip in governor.leave_epoch(record)] == [3]
    assert torch.equal(weights_of(population)[3], before[3])
    population.pass_time()
    population.train_epoch()
    assert bool((weights_of(population)[dead(population)] == 0).all())


def test_a_restarted_row_is_whole_until_it_is_silenced_again() -> None:
    population = lesioned("mlp")
    live_on(population, range(2))
    population.reset_rows(torch.tensor([3]), [8])
    assert not bool(dead(population)[3].any())
    fresh = make_population("mlp", 1, first=8)
    for name, value in extract(fresh, 0).state_dict().items():
        assert torch.equal(extract(population, 3).state_dict()[name], value)


def test_masks_of_another_shape_are_refused() -> None:
    population = make_population("mlp", 3)
    width = population.pools[HOST].template.width
    for wrong in (torch.ones(2, width), torch.ones(1, width, dtype=torch.bool)):
        with pytest.raises(AgreementError, match="boolean for each weight"):
            population.silence_rows(torch.tensor([0, 1]), wrong)
    assert population.live is None


def test_a_row_given_other_data_learns_from_it_and_its_neighbours_do_not() -> None:
    moved, still, other = (make_population("mlp", 4) for _ in range(3))
    other.feed.assign(torch.arange(4), torch.tensor([1, 1, 1, 1]))
    moved.feed.assign(torch.tensor([2]), torch.tensor([1]))
    assert moved.feed.assignment.tolist() == [0, 1, 1, 1]
    for split in ("validation", "test"):
        rows = torch.arange(4)
        ((ours, _),) = moved.feed.held_out(split, rows)
        ((theirs, _),) = other.feed.held_out(split, rows)
        assert torch.equal(ours[2], theirs[2])
        assert not torch.equal(ours[0], theirs[0])
    losses = [population.train_epoch().loss for population in (moved, still, other)]
    torch.testing.assert_close(losses[0][[0, 1, 3]], losses[1][[0, 1, 3]], rtol=1e-12, atol=0)
    torch.testing.assert_close(losses[0][2], losses[2][2], rtol=1e-12, atol=0)
    scores = [population.evaluate().loss for population in (moved, other)]
    torch.testing.assert_close(scores[0][2], scores[1][2], rtol=1e-12, atol=0)
    moved.feed.assign(torch.tensor([2]), torch.tensor([0]))
    assert torch.equal(moved.feed.epoch(moved.seeds, moved.lifecycle.epoch),
                       still.feed.epoch(still.seeds, still.lifecycle.epoch))  # fmt: skip
    for wrong in (2, -1):
        with pytest.raises(DataError, match="valid: 0 to 1"):
            moved.feed.assign(torch.tensor([0]), torch.tensor([wrong]))


def test_an_environment_whose_task_has_changed_has_no_past() -> None:
    population = make_population("mlp", 3)
    governor = Governor(population)
    governor.losses[:] = 0.01  # it had learned its task
    governor.best[:] = 99.0
    governor.trips[:] = 2
    governor.enter_epoch()
    governor.forget(torch.tensor([0, 2]))
    record, scores = population.train_epoch(), population.evaluate()
    tripped = {trip.environment for trip in governor.leave_epoch(record, scores)}
    assert tripped == {1}, "a new task's loss is no explosion"
    assert governor.trips.tolist() == [0, 3, 0]
