"""From a task to a population that trains on it."""

from dataclasses import replace

import torch

from esper.tolaria.feed import Feed
from esper.tolaria.population import Population, PopulationConfig
from esper.tolaria.tasks import Task, find_task


def population_of(
    task: Task | str,
    environments: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    config: PopulationConfig | None = None,
) -> Population:
    """`environments` hosts on one task, each with its own weights and order of data.

    Rate and budget are the task's; the rest is as in `config`.
    """
    task = find_task(task) if isinstance(task, str) else task
    config = replace(
        config or PopulationConfig(), rate=task.learning_rate, budget=task.budget_params()
    )
    feed = Feed(
        [task.load_data(seed, device)],
        [0] * environments,
        batch=task.batch_size,
        batches=task.batches_per_epoch,
        device=device,
        dtype=config.dtype,
        augmentation=task.augmentation,
    )
    return Population(
        task.build_host, feed, identities=range(environments), seed=seed, config=config
    )
