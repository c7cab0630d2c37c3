"""Does learning to grow pay? What the raw results of that study say, as numbers.

A learned controller is one population of trainings: its figures are over all of them. Gains are
points of test accuracy over the paired control less rent; scores are gains over what can be gained
in the context. Differences and shares of a gap are of means, because every context counts; the
interquartile mean is given beside it.

Shapes: `R` trainings, `C` contexts, `E` episodes of each.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from esper.garden.evaluation import HARM, Result
from esper.garden.statistics import Estimate, interquartile_mean_interval, mean, mean_interval
from esper.leyline import DEFAULT_RENT, AgreementError, DataError
from studies.comparisons import paired_difference, probability_of_improvement, share_of_gap
from studies.cubes import Array, Results, Value, members, read_results
from studies.folders import RESULTS, read_description

TRAINING = "training"
TAMIYO, BLANKED, UNTAUGHT, APPRENTICE = "tamiyo", "blanked", "untaught", "apprentice"
NEVER, CONSTANT, ORACLE, BANDIT = "never", "best_constant", "oracle", "bandit"
ORDER = (
    TAMIYO, APPRENTICE, UNTAUGHT, BLANKED, BANDIT, CONSTANT, "heuristic", "race", "gap", "plateau",
    "periodic", "random", NEVER, ORACLE,
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One controller on one group of contexts."""

    controller: str
    episodes: int  # of each context
    score: Estimate  # interquartile mean
    mean_score: Estimate
    gain: Estimate  # mean, points
    over_constant: Estimate | None  # probability of improvement; None where there is none
    over_heuristic: Estimate | None
    gap_closed: Estimate | None  # from best constant to oracle
    harmful: Estimate  # share of episodes
    rollbacks: float  # share of episodes
    added: float  # parameters
    flops: float  # times those of never growing
    area: float  # points over never growing, mean over all epochs


class LearningStudy:
    """A study's folder: which controllers were played where, and what it cost to make them."""

    def __init__(self, results: Sequence[Result], description: Mapping[str, Any]) -> None:
        self.description = description
        made = description.get("made", {})  # results of others under the same name do not count
        own = [each for each in results if made.get(each.controller, each.made) == each.made]
        self.results = Results(own)
        self.groups: dict[str, list[str]] = {
            str(name): list(contexts) for name, contexts in description["groups"].items()
        }
        named = self.results.controllers
        stems = dict.fromkeys(name.rpartition("-")[0] for name in named)
        trained = {kind: members(named, kind) for kind in stems if kind}
        self.trainings = {kind: names for kind, names in trained.items() if names}  # tamiyo-0 …
        learned = {name for names in self.trainings.values() for name in names}
        found = [name for name in named if name not in learned] + list(self.trainings)
        place = {name: number for number, name in enumerate(ORDER)}
        self.controllers = sorted(found, key=lambda name: place.get(name, len(place)))
        self.best_heuristic = str(description["best_heuristic"])
        self._lines: dict[tuple[str, float], list[Line]] = {}
        for needed in (TAMIYO, CONSTANT, self.best_heuristic):
            if needed not in self.controllers:
                raise DataError(
                    f"The study has no results of {needed!r}",
                    given=", ".join(self.controllers) or "none at all",
                    fix="let the study finish: the same command goes on where it was",
                )

    @classmethod
    def read(cls, folder: Path) -> "LearningStudy":
        description = read_description(folder)
        for key in ("groups", "best_heuristic", "episodes"):
            if key not in description:
                raise DataError(f"The description of the study in {folder} lacks its {key}")
        return cls(read_results(folder / RESULTS), description)

    def names(self, controller: str) -> list[str]:
        """What its trainings are called in the results."""
        return self.trainings.get(controller) or [controller]

    @property
    def episodes(self) -> int:
        """How many each controller played in each context."""
        return int(self.gains(CONSTANT, self.groups[TRAINING][:1]).shape[2])

    def spent(self, controller: str) -> float | None:
        """Episodes that one training, or the search for it, took; None where it is not known."""
        known = self.description["episodes"]
        counts = [known[name] for name in (*self.names(controller), controller) if name in known]
        return sum(counts) / len(counts) if counts else None

    @cached_property
    def played(self) -> dict[str, list[str]]:
        """By group, the controllers that were played in all of its contexts."""
        return {
            group: [
                name for name in self.controllers if self.results.has(self.names(name), contexts)
            ]
            for group, contexts in self.groups.items()
        }

    def gains(
        self,
        controller: str,
        contexts: Sequence[str],
        rent: float = DEFAULT_RENT,
        beside: Sequence[str] = (),
    ) -> Array:
        """[R, C, E] points, of the cases that those `beside` it played too."""
        return self._cube(controller, contexts, beside, lambda result: result.net_gain(rent))

    def scores(
        self,
        controller: str,
        contexts: Sequence[str],
        rent: float = DEFAULT_RENT,
        beside: Sequence[str] = (),
    ) -> Array:
        """[R, C, E], likewise."""
        return self._cube(controller, contexts, beside, lambda result: result.score(rent))

    def _cube(
        self, controller: str, contexts: Sequence[str], beside: Sequence[str], value: Value
    ) -> Array:
        others = [name for other in beside for name in self.names(other)]
        return self.results.cube(self.names(controller), contexts, value, others)

    def lead(
        self, group: str, over: str, rent: float = DEFAULT_RENT, *, who: str = TAMIYO
    ) -> Estimate | None:
        """Mean net gain of a controller less another's, points; None where one was not played."""
        if not {who, over} <= set(self.played[group]):
            return None
        contexts = self.groups[group]
        pair = (who, over)
        mine, theirs = (self.gains(name, contexts, rent, pair) for name in pair)
        return paired_difference(mine, theirs, statistic=mean)

    def score_lead(
        self, group: str, over: str, rent: float = DEFAULT_RENT, *, who: str = TAMIYO
    ) -> Estimate | None:
        """The same of interquartile means of scores."""
        if not {who, over} <= set(self.played[group]):
            return None
        contexts = self.groups[group]
        pair = (who, over)
        return paired_difference(*(self.scores(name, contexts, rent, pair) for name in pair))

    def gap_closed(
        self, group: str, rent: float = DEFAULT_RENT, *, who: str = TAMIYO
    ) -> Estimate | None:
        """None where there is no oracle, or none that is better than the constant schedule."""
        if ORACLE not in self.played[group]:
            return None
        contexts = self.groups[group]
        names = (who, CONSTANT, ORACLE)
        three = (self.scores(name, contexts, rent, names) for name in names)
        try:
            return share_of_gap(*three)
        except AgreementError:
            return None

    def harmful(self, controller: str, group: str, rent: float = DEFAULT_RENT) -> Estimate:
        """The share of episodes that ended clearly worse than never grown."""
        below = self.gains(controller, self.groups[group], rent) < -HARM
        return mean_interval(below.astype(np.float64))

    def line(self, controller: str, group: str, rent: float = DEFAULT_RENT) -> Line:
        contexts, played = self.groups[group], self.played[group]
        names = self.names(controller)
        scores, gains = (get(controller, contexts, rent) for get in (self.scores, self.gains))

        def improvement(over: str) -> Estimate | None:
            if controller == over or over not in played:
                return None
            pair = (controller, over)
            both = (self.gains(name, contexts, rent, pair) for name in pair)
            return probability_of_improvement(*both)

        def average(get: Any, beside: Sequence[str] = ()) -> float:
            return float(self.results.cube(names, contexts, get, beside).mean())

        def beside_never(get: Any) -> tuple[float, float]:
            if NEVER not in played:
                return average(get), math.nan
            alone = self.results.cube([NEVER], contexts, get, names)
            return average(get, [NEVER]), float(alone.mean())

        flops, flops_alone = beside_never(lambda result: result.flops)
        area, area_alone = beside_never(lambda result: result.area)
        return Line(
            controller=controller,
            episodes=int(gains.shape[2]),
            score=interquartile_mean_interval(scores),
            mean_score=mean_interval(scores),
            gain=mean_interval(gains),
            over_constant=improvement(CONSTANT),
            over_heuristic=improvement(self.best_heuristic),
            gap_closed=self.gap_closed(group, rent, who=controller),
            harmful=self.harmful(controller, group, rent),
            rollbacks=average(lambda result: result.rolled_back),
            added=average(lambda result: result.added),
            flops=flops / flops_alone,
            area=area - area_alone,
        )

    def lines(self, group: str, rent: float = DEFAULT_RENT) -> list[Line]:
        """All controllers that were played in a group, worked out once."""
        if (group, rent) not in self._lines:
            self._lines[group, rent] = self._worked_out(group, rent)
        return self._lines[group, rent]

    def _worked_out(self, group: str, rent: float) -> list[Line]:
        return [self.line(name, group, rent) for name in self.played[group]]
