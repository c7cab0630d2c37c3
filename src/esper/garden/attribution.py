"""Attribution: how much of an environment's validation score is each seed's doing.

An observation and a diagnostic, not the objective. All questions to the population are put in one
call, which runs each distinct subset of seeds once. NaN marks slots without a seed that is on.

Shapes: `S` slots, `k` seeds that are on, `M` orders in which they join.
"""

from itertools import permutations

import torch
from torch import Tensor

from esper.leyline.settings import COUNT, Range, require
from esper.tolaria.population import Population
from esper.tolaria.random_streams import keys

MAX_EXACT_SEEDS = 4  # whose orders are all taken: they have 2^k subsets


def leave_one_out(population: Population, environment: int) -> Tensor:
    """[S]: points of accuracy with each seed minus without it."""
    on = _on(population, environment)
    none = torch.zeros(1, len(on), dtype=torch.bool)
    scores = _scores(population, environment, torch.cat([none, torch.eye(len(on)).bool()]))
    return (scores[0] - scores[1:]).masked_fill(~on, torch.nan)


def shapley(population: Population, environment: int, *, samples: int = 64) -> Tensor:
    """[S]: Shapley values in points, what each seed adds on joining, on average over orders.

    Exact, over all orders, for up to 4 seeds that are on; of more, over so many `samples` of them,
    the environment's own and the same every time.
    """
    require("The number of orders of Shapley values", samples, COUNT)
    on = _on(population, environment)
    count = int(on.sum())
    if count <= MAX_EXACT_SEEDS:
        rank = torch.tensor(list(permutations(range(count))), dtype=torch.int64)
    else:
        row = torch.tensor([environment])
        epochs = population.lifecycle.epoch[row]
        drawn = keys(population.seeds[row], "shapley", epochs, samples * count)
        rank = drawn.view(samples, count).argsort(stable=True, dim=-1)
    # [M, k + 1, k]: the networks that grow by one seed at a time, from none to all.
    absent = rank[:, None] >= torch.arange(count + 1)[:, None]
    off = torch.zeros(*absent.shape[:2], len(on), dtype=torch.bool)
    off[..., on] = absent
    scores = _scores(population, environment, off.flatten(0, 1)).view(absent.shape[:2])
    values = torch.full(on.shape, torch.nan, dtype=torch.float64)
    values[on] = scores.diff(dim=-1).gather(-1, rank).mean(0)
    return values


def _on(population: Population, environment: int) -> Tensor:
    """[S] bool: which slots have a seed that shows in the output."""
    require("The environment", environment, Range(0, len(population) - 1, whole=True))
    return population.lifecycle.alpha[environment] > 0


def _scores(population: Population, environment: int, off: Tensor) -> Tensor:
    """[Q] percent on validation data, with the seeds of `off` [Q, S] switched off."""
    row = torch.full((len(off),), environment)
    return population.counterfactual(row, off).accuracy.double()
