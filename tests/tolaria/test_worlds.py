"""From the name of a task to a population that learns it."""

from dataclasses import replace

import pytest
import torch

from esper.leyline import Actions, Blend, UnknownNameError
from esper.tolaria import Feed, Population, find_task, population_of
from esper.tolaria.augment import Augmentation
from esper.tolaria.data.splits import Split, Splits
from tests.tolaria.twins import HOSTS, make_splits


def test_a_named_task_trains_and_grows_within_its_budget() -> None:
    population = population_of("mnist1d_mlp", 3, seed=1)
    before = population.evaluate().loss
    actions = {"op": 1, "slot": 0, "blend": int(Blend.IMMEDIATE)}
    convpool = population.catalogue.index("convpool")
    population.apply(Actions.of(population.space, 3, blueprint=convpool, **actions))
    for _ in range(2):
        population.train_epoch()
        population.pass_time()
    assert bool((population.evaluate().loss < before).all())
    assert int(population.budget[0]) == find_task("mnist1d_mlp").budget_params()


def test_a_language_task_runs_fused_and_every_environment_learns() -> None:
    task = find_task("stdlib")

    def shortened(seed: int) -> Splits:
        whole = task.load(seed)
        return replace(whole, validation=Split(*(part[:64] for part in whole.validation)))

    population = population_of(replace(task, load=shortened), 2)
    population.feed.batches = 3
    first = population.train_epoch().loss
    population.pass_time()
    assert bool((population.train_epoch().loss < first).all())
    assert bool((population.evaluate().accuracy > 5).all())


def test_an_unknown_task_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'mnist1d"):
        population_of("mnist1dd", 2)


def test_augmentation_differs_by_environment_and_batch_and_repeats_with_the_run() -> None:
    def batches(count: int) -> torch.Tensor:
        feed = Feed(
            [make_splits("conv2d")],
            [0] * count,
            batch=4,
            batches=3,
            augmentation=Augmentation(shift=2, flip=True),
        )
        population = Population(HOSTS["conv2d"], feed, identities=range(count))
        order = feed.epoch(population.seeds, population.lifecycle.epoch)
        same = order[:1].expand(3, -1, -1)  # the same samples three times
        return torch.stack([feed.fetch(index)[0] for index in same])

    few, many = batches(2), batches(5)
    assert torch.equal(few, many[:, :2])
    assert not torch.equal(few[0], few[1])
    assert not torch.equal(few[:, 0], few[:, 1])
