"""What is seen while nothing is planted: moments of hosts that only listen, one after the other.

Whether to plant now or later cannot be read off what single decisions gained: it depends on what
will be heard until then. Here drawn worlds are played without planting, and kept is what is seen at
some moments of each, with the number of the one after it. Nothing has to come of it, so an episode
of every case is enough.

Shapes: `M` moments, `F` features, `C` cases.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.garden import LAYOUT, Bed, Plot
from esper.leyline import LifecycleOp
from esper.tamiyo.token_layout import WHOLE_TOKEN
from studies.greenhouse_gains import LEAST_LEFT, collect_parts, in_one, parts_of, torched

EPOCHS = (3, 4, 5, 6, 7, 8, 10, 12, 15, 19, 24, 30, 38, 48)  # at which moments are kept


class Moments(NamedTuple):
    """What was seen."""

    observations: Tensor  # [M, F]
    after: Tensor  # [M] the number of the next one of the same case; -1: there is none
    plot: Tensor  # [M]
    seed: Tensor  # [M]

    @classmethod
    def load(cls, folders: list[Path]) -> "Moments":
        """Those at which planting was ever measured: later ones leave it too little time."""
        whole = in_one(parts_of(folders))
        found = cls(*(torched(whole[name]) for name in cls._fields))
        of_all = LAYOUT.split(found.observations)[0]
        remaining, horizon = (of_all[:, WHOLE_TOKEN.names.index(name)]
                              for name in ("remaining", "horizon"))  # fmt: skip
        return found.among((remaining * 10 ** (3 * horizon)).round() >= LEAST_LEFT)

    def among(self, kept: Tensor) -> "Moments":
        """Those that are `kept` [M] bool; a case ends before its first one that is not."""
        number = torch.where(kept, kept.cumsum(0) - 1, -1)
        after = torch.where(self.after < 0, -1, number[self.after])
        return Moments(*(part[kept] for part in self._replace(after=after)))


def heard(plot: Plot, number: int, device: str) -> dict[str, Any]:
    """A plot is played, and nothing is ever planted."""
    bed = Bed(plot, 1, device=device)
    last = torch.full((len(bed.players),), -1)  # the latest moment of each case
    seen, after, count = list[Tensor](), torch.zeros(0, dtype=torch.int64), 0
    for epoch in range(plot.horizon):
        open_ = bed.legal.masks["op"][:, LifecycleOp.GERMINATE] & bed.episodes.running[bed.players]
        rows = open_.nonzero()[:, 0] if epoch in EPOCHS else bed.players[:0]
        here, known = count + torch.arange(len(rows)), last[rows] >= 0
        after = torch.cat((after, torch.full_like(here, -1)))
        after[last[rows][known]] = here[known]
        last[rows], count = here, count + len(rows)
        seen.append(bed.observations[rows].half())
        bed.step(torch.zeros_like(bed.advice.values))
    numbers = torch.full((count,), number).short()
    found = {"observations": torch.cat(seen), "after": after, "plot": numbers}
    return {name: each.numpy() for name, each in found.items()}


def listen(options: argparse.Namespace) -> None:
    """Moments of plots in which nothing is planted."""
    play = partial(heard, device=options.device)
    collect_parts(options, play, listening=True)
