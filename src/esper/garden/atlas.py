"""The atlas: what each single seed gains in each context, measured on several random seeds.

An arm is (slot, blueprint, blend, epoch): plant it then, advance and fossilize it as soon as the
gates open. The atlas knows every arm's gain over the paired control and what it pays rent for, so
the best arms follow for any rent without another measurement. Arms are chosen by validation data;
what they are worth is told by test data. Schedules of several seeds are searched from the best
arms and kept with the atlas.

Shapes: `C` contexts, `A` arms, `K` random seeds of a case.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.archive import read_archive, write_archive
from esper.garden.cases import Case
from esper.garden.contexts import Context
from esper.garden.playing import Job, Playground, Progress
from esper.garden.rewards import net_of_rent, reward_scale
from esper.garden.suites import Suite
from esper.leyline import AgreementError, Blend, BlueprintCatalogue
from esper.leyline.constants import DEFAULT_RENT
from esper.tamiyo.controllers import Arm, Schedule

ATLAS_EPOCHS = (4, 9, 15)
ATLAS_SEEDS = 8
FIRST_ATLAS_SEED = 500_000  # neither trained nor evaluated on
SPLITS = 64  # random halves of the seeds: arms are chosen on one and scored on the other
SEARCH_EPOCHS = (4, 9)
SEARCH_BLENDS = (Blend.IMMEDIATE, Blend.GATE)
SEARCH_SEEDS = 4
WAIT_MARGIN = 0.5  # points: an arm that gains less on other seeds is no reason to grow


def arms_of(
    catalogue: BlueprintCatalogue,
    *,
    epochs: Sequence[int] = ATLAS_EPOCHS,
    blends: Sequence[Blend] = tuple(Blend),
    budget: int | None = None,
) -> list[Arm]:
    """Every seed that fits, within the budget of parameters, with every blend, at every epoch."""
    costs = catalogue.total_costs  # [S, B, blends]
    return [
        Arm(slot=slot, blueprint=name, blend=blend.name.lower(), epoch=epoch)
        for place, slot in enumerate(catalogue.slots.names)
        for index, name in enumerate(catalogue.names)
        if catalogue.costs[place][index] >= 0
        for blend in blends
        if budget is None or int(costs[place, index, blend]) <= budget
        for epoch in epochs
    ]


@dataclass(frozen=True)
class Plans:
    """Schedules that were found for a suite."""

    oracle: tuple[Schedule, ...]  # one a context; empty: waiting is better
    constant: Schedule  # the same for all contexts
    episodes: int  # that the search played

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> "Plans":
        oracle = tuple(tuple(map(Arm.from_dict, schedule)) for schedule in stored["oracle"])
        return cls(oracle, tuple(map(Arm.from_dict, stored["constant"])), int(stored["episodes"]))


@dataclass(frozen=True)
class Atlas:
    """Measured gains of arms, by context."""

    contexts: tuple[Context, ...]
    arms: tuple[Arm, ...]
    control: Tensor  # [C, K] percent on test data, never grown
    validation_control: Tensor  # [C, K] percent on validation data
    gain: Tensor  # [C, A, K] points over the control, of the committed network on test data
    validation: Tensor  # [C, A, K] the same on validation data
    exposure: Tensor  # [C, A, K] share of the host's parameters × share of the episode
    plans: Plans | None = None  # schedules of several seeds, where they were searched

    def net(self, rent: float = DEFAULT_RENT) -> Tensor:
        """[C, A, K] points on test data."""
        return net_of_rent(self.gain, self.exposure, rent)

    def judged(self, rent: float = DEFAULT_RENT) -> Tensor:
        """[C, A, K] points on validation data: what arms are chosen by."""
        return net_of_rent(self.validation, self.exposure, rent)

    def scales(self, rent: float = DEFAULT_RENT) -> Tensor:
        """[C]: the best arm's net gain, at least the smallest that counts."""
        return reward_scale(self.judged(rent).mean(2).amax(1))

    def best(self, rent: float = DEFAULT_RENT) -> list[Arm | None]:
        """The best arm of each context, None where waiting is better."""
        gains, places = self.judged(rent).mean(2).max(1)
        return [
            self.arms[place] if gain > WAIT_MARGIN else None
            for gain, place in zip(gains.tolist(), places.tolist(), strict=True)
        ]

    def best_gains(self, rent: float = DEFAULT_RENT) -> Tensor:
        """[C]: what the best arm of each context, chosen by validation data, gains on test data."""
        places = self.judged(rent).mean(2).argmax(1)
        return self.net(rent).mean(2).gather(1, places[:, None])[:, 0]

    def best_constant(self, rent: float = DEFAULT_RENT) -> Arm:
        """The arm with the best mean score over all contexts."""
        scores = self.judged(rent).mean(2) / self.scales(rent)[:, None]
        return self.arms[int(scores.mean(0).argmax())]

    def schedules(self) -> tuple[Schedule, ...]:
        """What the oracle follows in each context."""
        if self.plans is not None:
            return self.plans.oracle
        return tuple(() if arm is None else (arm,) for arm in self.best())

    def constant(self) -> Schedule:
        """What the best constant schedule is."""
        return (self.best_constant(),) if self.plans is None else self.plans.constant

    def summary(self, rent: float = DEFAULT_RENT, *, splits: int = SPLITS) -> dict[str, float]:
        """Oracle, best constant and random on seeds that did not choose them, as suite scores."""
        net, judged, scale = self.net(rent), self.judged(rent), self.scales(rent)
        half, rows = net.shape[2] // 2, torch.arange(len(self.contexts))
        chance = torch.Generator().manual_seed(0)
        chosen, constant = [], []  # what was gained on the other half, [C] each
        for _ in range(splits):
            order = torch.randperm(net.shape[2], generator=chance)
            here, there = judged[:, :, order[:half]].mean(2), net[:, :, order[half:]].mean(2)
            gains, places = here.max(1)
            chosen.append(torch.where(gains > WAIT_MARGIN, there[rows, places], 0.0))
            constant.append(there[:, (here / scale[:, None]).mean(0).argmax()])
        random = float((net.mean(2) / scale[:, None]).mean())
        scores = (torch.stack(each) / scale for each in (chosen, constant))
        best, ceiling = (float(score.mean(1).mean()) for score in scores)
        waits = torch.stack(chosen).mean(0) < WAIT_MARGIN
        return {
            "oracle": best,
            "best_constant": ceiling,
            "random": random,
            "best_constant_share": ceiling / best,
            "random_share": random / best,
            "wait_optimal_share": float(waits.double().mean()),
        }

    def save(self, path: Path) -> None:
        """Write the atlas as one atomic directory."""
        write_archive(
            path,
            kind=KIND,
            version=VERSION,
            tensors={name: getattr(self, name).float() for name in MEASURED},
            notes={
                "contexts": [context.to_dict() for context in self.contexts],
                "arms": [asdict(arm) for arm in self.arms],
                "plans": None if self.plans is None else asdict(self.plans),
            },
        )

    @classmethod
    def load(cls, path: Path) -> "Atlas":
        stored = read_archive(path, kind=KIND, version=VERSION)
        return cls(
            contexts=tuple(Context.from_dict(each) for each in stored.notes["contexts"]),
            arms=tuple(Arm.from_dict(each) for each in stored.notes["arms"]),
            plans=None if stored.notes["plans"] is None else Plans.from_dict(stored.notes["plans"]),
            **{name: stored.tensors[name].double() for name in MEASURED},
        )


KIND, VERSION = "esper atlas", 2
MEASURED = ("control", "validation_control", "gain", "validation", "exposure")


def measure_atlas(
    contexts: Sequence[Context],
    ground: Playground | None = None,
    *,
    epochs: Sequence[int] = ATLAS_EPOCHS,
    blends: Sequence[Blend] = tuple(Blend),
    seeds: int = ATLAS_SEEDS,
    progress: Progress = lambda done, total: None,
) -> Atlas:
    """Play every arm and the control in every context, many at once; hosts of one shape."""
    ground = ground or Playground()
    if seeds < 2:
        what = "An atlas chooses arms on one half of its seeds and scores them on the other"
        raise AgreementError(what, given=f"{seeds} seeds", valid="at least 2 seeds")
    population = ground.episodes(contexts).population
    budget = int(population.budget.min())
    arms = arms_of(population.catalogue, epochs=epochs, blends=blends, budget=budget)
    for arm in arms:
        arm.require_in_time(ground.horizon)
    first = population.config.rules.min_host_epochs
    if min(epochs) < first:
        what = "A host is alone at first, so an arm this early would be another one"
        raise AgreementError(what, given=f"epoch {min(epochs)}", valid=f"from epoch {first}")
    choices: list[Schedule] = [(), *((arm,) for arm in arms)]
    jobs = [
        Job(choice, Case(context, FIRST_ATLAS_SEED + number))
        for number in range(seeds)
        for choice in choices
        for context in contexts
    ]
    found = ground.play_all(jobs, mixed=True, progress=progress)
    shape = (seeds, len(choices), len(contexts))
    test, validation, exposure = (
        values.view(shape).permute(2, 1, 0)
        for values in (found.test, found.validation, found.exposure)
    )
    return Atlas(
        contexts=tuple(contexts),
        arms=tuple(arms),
        control=test[:, 0],
        validation_control=validation[:, 0],
        gain=test[:, 1:] - test[:, :1],
        validation=validation[:, 1:] - validation[:, :1],
        exposure=exposure[:, 1:],
    )


# --- schedules of several seeds ------------------------------------------------------------
#
# The search is greedy: to the best arm of a context, or of all contexts together, arms in other
# slots are added as long as one more pays on validation data.


@dataclass(frozen=True)
class _Front:
    """A schedule that may be added to, and what it is worth in the contexts it is meant for."""

    schedule: Schedule
    contexts: tuple[int, ...]  # one for the oracle's, all of them for the constant
    worth: float  # mean over its contexts of net gain / scale, on validation data

    def wider(self, arms: Sequence[Arm]) -> list[Schedule]:
        """With one more arm, in another slot; waiting stays what it is."""
        taken = {arm.slot for arm in self.schedule}
        return [(*self.schedule, arm) for arm in arms if taken and arm.slot not in taken]


def search_plans(
    atlas: Atlas,
    ground: Playground | None = None,
    *,
    epochs: Sequence[int] = SEARCH_EPOCHS,
    blends: Sequence[Blend] = SEARCH_BLENDS,
    seeds: int = SEARCH_SEEDS,
    progress: Progress = lambda done, total: None,
) -> Atlas:
    """The same atlas with the oracle's schedules and the best constant one, of up to S seeds."""
    seeds = min(seeds, atlas.gain.shape[2])
    ground = ground or Playground()
    population = ground.episodes(atlas.contexts).population
    catalogue, budget = population.catalogue, int(population.budget.min())
    arms = arms_of(catalogue, epochs=epochs, blends=blends, budget=budget)
    # The best single arm of every context, then the one that is best for all.
    net = atlas.judged()[:, :, :seeds].mean(2) / atlas.scales()[:, None]  # [C, A]
    place = {arm: index for index, arm in enumerate(atlas.arms)}
    fronts, played = [], 0
    for context, arm in enumerate(atlas.best()):
        worth = 0.0 if arm is None else float(net[context, place[arm]])
        fronts.append(_Front(() if arm is None else (arm,), (context,), worth))
    everywhere, best = tuple(range(len(atlas.contexts))), atlas.best_constant()
    fronts.append(_Front((best,), everywhere, float(net[:, place[best]].mean())))
    for _ in range(len(catalogue.slots) - 1):
        wider = [front.wider(arms) for front in fronts]
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
        scores = net_of_rent(found.validation, found.exposure, DEFAULT_RENT)
        sizes = [len(w) * len(f.contexts) * seeds for f, w in zip(fronts, wider, strict=True)]
        parts = zip(fronts, wider, scores.split(sizes), strict=True)
        fronts = [_widened(atlas, *part, seeds) for part in parts]
    *oracle, constant = (front.schedule for front in fronts)
    return replace(atlas, plans=Plans(tuple(oracle), constant, played))


def _widened(
    atlas: Atlas, front: _Front, schedules: Sequence[Schedule], net: Tensor, seeds: int
) -> _Front:
    """The front with its best additional arm, where that pays.

    `net` are scores of schedules, by contexts and seeds; the controls' are taken off here.
    """
    if not schedules:
        return front
    contexts = torch.tensor(front.contexts)
    scores, scale = net.view(len(schedules), len(contexts), seeds), atlas.scales()[contexts]
    gains = (scores - atlas.validation_control[contexts, :seeds]).mean(2)  # [A, C]
    worth, best = (gains / scale).mean(1).max(0)
    # Among many candidates noise always finds something better, so in one context an arm has
    # to bring points; over many contexts noise averages out, and hardly anything is asked.
    better = float(worth) > front.worth + WAIT_MARGIN / float(scale.sum())
    return _Front(schedules[int(best)], front.contexts, float(worth)) if better else front


# --- shipped ----------------------------------------------------------------------------------

FOLDER = Path(__file__).parent / "data"


@lru_cache
def shipped_atlas(suite: Suite) -> Atlas | None:
    """The measured atlas of a suite; None where this very suite has not been measured."""
    for folder in sorted(FOLDER.glob("*/manifest.json")):
        atlas = Atlas.load(folder.parent)
        if {context.key for context in atlas.contexts} == {each.key for each in suite.training}:
            return atlas
    return None
