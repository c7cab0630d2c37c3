"""Schedules that were found for a suite, and many schedules on many cases at once.

Shapes: `J` episodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.garden.cases import Case
from esper.garden.episodes import Episodes
from esper.garden.playing import play
from esper.tamiyo.controllers import Arm, RowSchedule
from esper.tamiyo.controllers.schedules import Schedule

Progress = Callable[[int, int], None]  # episodes done, of how many


@dataclass(frozen=True)
class Plans:
    """Schedules that were found for a suite."""

    oracle: tuple[Schedule, ...]  # one a context; empty: waiting is better
    constant: Schedule  # the same for all contexts
    episodes: int  # that the search played

    def rows(self, chosen: Sequence[int]) -> "Plans":
        return Plans(tuple(self.oracle[each] for each in chosen), self.constant, self.episodes)

    def to_dict(self) -> dict[str, Any]:
        return {
            "oracle": [[arm.to_dict() for arm in schedule] for schedule in self.oracle],
            "constant": [arm.to_dict() for arm in self.constant],
            "episodes": self.episodes,
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> "Plans":
        oracle = tuple(tuple(map(Arm.from_dict, schedule)) for schedule in stored["oracle"])
        constant = tuple(map(Arm.from_dict, stored["constant"]))
        return cls(oracle, constant, int(stored["episodes"]))


class Measurements(NamedTuple):
    """Of every episode, [J] each, in the order they were asked for."""

    test: Tensor  # percent: the committed network, mean of the last epochs
    validation: Tensor  # percent
    exposure: Tensor


def play_plans(
    episodes: Episodes,
    jobs: Sequence[tuple[Case, Schedule]],
    progress: Progress = lambda done, total: None,
) -> Measurements:
    """Every schedule on its case, as many at once as there are rows."""
    # Mixed, so that every batch has about as many seeds of each kind and pools keep their sizes.
    order = torch.randperm(len(jobs), generator=torch.Generator().manual_seed(0))
    values = torch.zeros(3, len(jobs), dtype=torch.float64)
    done = 0
    for places in order.split(len(episodes)):
        batch = [jobs[place] for place in places.tolist()]
        played = play(
            episodes, RowSchedule([schedule for _, schedule in batch]), [case for case, _ in batch]
        )
        values[:, places] = torch.stack([played.test, played.validation, played.exposure])
        done += len(batch)
        progress(done, len(jobs))
    return Measurements(*values)
