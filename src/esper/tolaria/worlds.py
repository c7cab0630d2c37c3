"""From a task to a population that trains on it."""

from dataclasses import fields
from typing import Any

import torch

from esper.leyline.errors import UnknownNameError
from esper.tolaria.feed import Feed
from esper.tolaria.population import Population
from esper.tolaria.population_config import PopulationConfig
from esper.tolaria.tasks import Task, find_task


def population_of(
    task: Task | str,
    environments: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    **settings: Any,
) -> Population:
    """`environments` hosts on one task, each with its own weights and order of data.

    `settings` are those of `PopulationConfig`; rate and budget are the task's unless given.
    """
    task = find_task(task) if isinstance(task, str) else task
    known = {field.name for field in fields(PopulationConfig)}
    for name in settings:
        if name not in known:
            raise UnknownNameError.of("setting of a population", name, sorted(known))
    defaults = {"rate": task.learning_rate, "budget": task.budget_params()}
    config = PopulationConfig(**(defaults | settings))
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
