"""The search for schedules of several seeds, from an atlas of single ones.

It is greedy: to the best arm of a context, or of all contexts together, arms in other slots are
added as long as one more pays on validation data.

Shapes: `C` contexts, `A` candidates, `K` random seeds of a case.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.garden.atlas import FIRST_ATLAS_SEED, WAIT_MARGIN, Atlas, Plans, arms_of
from esper.garden.cases import Case
from esper.garden.dealing import ALONE, Ranks
from esper.garden.playing import Job, Playground, Progress
from esper.garden.rewards import net_of_rent
from esper.leyline import DEFAULT_EPISODE_LENGTH, DEFAULT_RENT, Blend
from esper.tamiyo.controllers.schedules import Schedule
from esper.tolaria.population_config import PopulationConfig

SEARCH_EPOCHS = (4, 9)
SEARCH_BLENDS = (Blend.IMMEDIATE, Blend.GATE)
SEARCH_SEEDS = 4


@dataclass(frozen=True)
class _Front:
    """A schedule that may be added to, and what it is worth in the contexts it is meant for."""

    schedule: Schedule
    contexts: tuple[int, ...]  # one for the oracle's, all of them for the constant
    worth: float  # mean over its contexts of net gain / scale, on validation data


def search_plans(
    atlas: Atlas,
    *,
    epochs: Sequence[int] = SEARCH_EPOCHS,
    blends: Sequence[Blend] = SEARCH_BLENDS,
    seeds: int = SEARCH_SEEDS,
    rows: int = 64,
    horizon: int = DEFAULT_EPISODE_LENGTH,
    device: torch.device | str = "cpu",
    config: PopulationConfig | None = None,
    progress: Progress = lambda done, total: None,
    ranks: Ranks = ALONE,
) -> Atlas:
    """The same atlas with the oracle's schedules and the best constant one, of up to S seeds."""
    seeds = min(seeds, atlas.gain.shape[2])
    ground = Playground(rows, horizon=horizon, device=device, config=config, ranks=ranks)
    population = ground.episodes(atlas.contexts).population
    catalogue, budget = population.catalogue, int(population.budget.min())
    arms = arms_of(catalogue, epochs=epochs, blends=blends, budget=budget)
    fronts, played = _first_fronts(atlas, seeds), 0
    for _ in range(len(catalogue.slots) - 1):
        wider = [
            [
                (*front.schedule, arm)
                for arm in arms
                if front.schedule and all(arm.slot != other.slot for other in front.schedule)
            ]
            for front in fronts
        ]
        jobs = [
            Job(schedule, Case(atlas.contexts[context], FIRST_ATLAS_SEED + number))
            for front, schedules in zip(fronts, wider, strict=True)
            for schedule in schedules
            for context in front.contexts
            for number in range(seeds)
        ]
        if not jobs:
            break
        found = ground.play_all(jobs, mixed=True, progress=progress)
        played += len(jobs)
        net = net_of_rent(found.validation, found.exposure, DEFAULT_RENT)
        fronts = _widened(atlas, fronts, wider, net, seeds)
    *oracle, constant = (front.schedule for front in fronts)
    return replace(atlas, plans=Plans(tuple(oracle), constant, played))


def _first_fronts(atlas: Atlas, seeds: int) -> list[_Front]:
    """The best single arm of every context, then the one that is best for all."""
    net = atlas.judged()[:, :, :seeds].mean(2) / atlas.scales()[:, None]  # [C, A]
    place = {arm: index for index, arm in enumerate(atlas.arms)}
    fronts = []
    for context, arm in enumerate(atlas.best()):
        worth = 0.0 if arm is None else float(net[context, place[arm]])
        fronts.append(_Front(() if arm is None else (arm,), (context,), worth))
    constant = atlas.best_constant()
    everywhere = tuple(range(len(atlas.contexts)))
    return [*fronts, _Front((constant,), everywhere, float(net[:, place[constant]].mean()))]


def _widened(
    atlas: Atlas,
    fronts: Sequence[_Front],
    wider: Sequence[Sequence[Schedule]],
    net: Tensor,
    seeds: int,
) -> list[_Front]:
    """Each front with its best additional arm, where that pays.

    `net` [episodes] are net scores in the order of fronts, schedules, contexts and seeds; the
    controls' are taken off here.
    """
    control = atlas.validation_control[:, :seeds]
    scale = atlas.scales()
    result, start = [], 0
    for front, schedules in zip(fronts, wider, strict=True):
        contexts = torch.tensor(front.contexts)
        size = len(schedules) * len(contexts) * seeds
        scores = net[start : start + size].view(len(schedules), len(contexts), seeds)
        start += size
        if not schedules:
            result.append(front)
            continue
        gains = (scores - control[contexts]).mean(2)  # [A, C]
        worth, best = (gains / scale[contexts]).mean(1).max(0)
        # Among many candidates noise always finds something better, so in one context an arm has
        # to bring points; over many contexts noise averages out, and hardly anything is asked.
        better = float(worth) > front.worth + WAIT_MARGIN / float(scale[contexts].sum())
        chosen = _Front(schedules[int(best)], front.contexts, float(worth))
        result.append(chosen if better else front)
    return result
