"""Attribution: how much of the validation score is each seed's doing.

An observation and a diagnostic, not the objective. All questions to the population are put in one
call, which runs each distinct subset of seeds once. NaN marks what was not measured.

Shapes: `N` environments, `S` slots, `E` environments asked, `k` seeds, `M` orders sampled.
"""

from collections.abc import Sequence
from functools import cache
from math import comb

import torch
from torch import Tensor

from esper.leyline.errors import EsperError
from esper.tolaria.population import Population
from esper.tolaria.random_streams import keys

MAX_EXACT_SEEDS = 4  # 2^k subsets are run for k seeds


class AttributionError(EsperError):
    """A question about seeds that cannot be answered as it was put."""


def leave_one_out(
    population: Population,
    split: str = "validation",
    environments: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """[N, S]: points of accuracy with the seed minus without it.

    NaN where no seed is on or nothing was asked.
    """
    on = population.lifecycle.alpha > 0
    if environments is not None:
        on &= torch.isin(torch.arange(len(on)), _rows(environments, on))[:, None]
    contribution = torch.full(on.shape, torch.nan, dtype=torch.float64)
    rows, slot = on.nonzero(as_tuple=True)
    if not len(rows):
        return contribution
    without = torch.nn.functional.one_hot(slot, on.shape[1]).bool()
    off = torch.cat((torch.zeros_like(without), without))
    scores = population.counterfactual(rows.repeat(2), off, split).accuracy.double()
    contribution[rows, slot] = scores[: len(rows)] - scores[len(rows) :]
    return contribution


def shapley(
    population: Population,
    environments: Tensor | Sequence[int] | None = None,
    split: str = "validation",
    *,
    samples: int | None = None,
) -> Tensor:
    """[N, S]: Shapley values in points; NaN where no seed is on or nothing was asked.

    Exact, over all subsets, for up to 4 seeds that are on. More need `samples`: the number of
    random orders in which the seeds join, each environment's own and the same every time.
    """
    on = population.lifecycle.alpha > 0
    asked = torch.arange(len(population)) if environments is None else _rows(environments, on)
    count = on[asked].sum(1)  # [E]
    many = count > MAX_EXACT_SEEDS
    if samples is None and bool(many.any()):
        raise AttributionError(
            f"Exact Shapley values run every subset of up to {MAX_EXACT_SEEDS} seeds",
            given=f"environment {int(asked[many][0])} with {int(count[many][0])} seeds on",
            fix="give samples=, the number of random orders to average over",
        )
    if samples is not None and samples < 1:
        raise AttributionError("Shapley values need at least one order", given=samples)

    questions = [_subsets(on, asked[count == k], k) for k in range(1, MAX_EXACT_SEEDS + 1)]
    rank = _ranks(population, on, asked[many], samples or 0)  # [E, M, S]
    questions.append(_prefixes(rank, asked[many]))
    environment, off = (torch.cat(parts) for parts in zip(*questions, strict=True))
    values = torch.full(on.shape, torch.nan, dtype=torch.float64)
    if not len(environment):
        return values
    answers = population.counterfactual(environment, off, split).accuracy.double()
    *exact, sampled = answers.split([len(part) for part, _ in questions])
    for k, scores in enumerate(exact, start=1):
        chosen = asked[count == k]
        where = on & torch.isin(torch.arange(len(on)), chosen)[:, None]
        values[where] = shapley_from_values(scores.view(-1, 2**k)).flatten()
    if len(sampled):
        scores = sampled.view(*rank.shape[:2], -1)  # [E, M, S + 1]
        joined = scores.diff(dim=-1).gather(-1, rank).mean(1)
        values[asked[many]] = joined.masked_fill(~on[asked[many]], torch.nan)
    return values


def shapley_from_values(values: Tensor) -> Tensor:
    """[..., k] from the worth of all subsets [..., 2^k]; bit i of a subset's number is player i."""
    subsets = values.shape[-1] if values.ndim else 0
    players = subsets.bit_length() - 1
    if players < 0 or subsets != 2**players:
        raise AttributionError(
            "Shapley values need the worth of every subset",
            given=list(values.shape),
            valid="[..., 2^players]",
        )
    return values.double() @ _weights(players).T


@cache
def _weights(players: int) -> Tensor:
    """[k, 2^k]: what each subset's worth counts for each player."""
    table = torch.zeros(players, 2**players, dtype=torch.float64)
    for player in range(players):
        for subset in range(2**players):
            others = (subset & ~(1 << player)).bit_count()
            share = 1.0 / (players * comb(players - 1, others))
            table[player, subset] = share if subset >> player & 1 else -share
    return table


def _rows(environments: Tensor | Sequence[int], on: Tensor) -> Tensor:
    rows: Tensor = torch.as_tensor(environments, dtype=torch.int64).unique()
    if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < len(on):
        raise AttributionError(
            "There is no such environment", given=rows.tolist(), valid=f"0 to {len(on) - 1}"
        )
    return rows


def _subsets(on: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """For environments with k seeds on: each 2^k times, with what is off, subset by subset."""
    present = torch.arange(2**k)[:, None] >> torch.arange(k) & 1 == 1  # [2^k, k]
    slots = on[rows].nonzero()[:, 1].view(-1, 1, k).expand(-1, 2**k, -1)
    off = on[rows][:, None].repeat(1, 2**k, 1)
    off.scatter_(2, slots, ~present.expand(len(rows), -1, -1))
    return rows.repeat_interleave(2**k), off.flatten(0, 1)


def _ranks(population: Population, on: Tensor, rows: Tensor, samples: int) -> Tensor:
    """[E, M, S]: when each slot joins in each sampled order; slots without a seed come last."""
    slots = on.shape[1]
    if not len(rows) or not samples:
        return torch.zeros(0, 0, slots, dtype=torch.int64)
    epochs = population.lifecycle.epoch[rows]
    drawn = keys(population.seeds[rows], "shapley", epochs, samples * slots)
    last = torch.iinfo(torch.int64).max
    drawn = drawn.view(-1, samples, slots).masked_fill(~on[rows][:, None], last)
    return drawn.argsort(stable=True, dim=-1).argsort(-1)


def _prefixes(rank: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """For each order the S + 1 networks that grow by one slot at a time."""
    _, samples, slots = rank.shape
    off = rank[:, :, None] >= torch.arange(slots + 1)[:, None]  # [E, M, S + 1, S]
    return rows.repeat_interleave(samples * (slots + 1)), off.flatten(0, 2)
