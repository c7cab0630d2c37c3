"""Commands of the garden: its contexts, its atlas, and controllers side by side."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

Name = Annotated[str, tyro.conf.arg(metavar="NAME")]


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """List the contexts of a suite, with the score of never growing and the best known gain."""

    suite: Name = "garden"
    """garden, garden_mlp, or the path of a suite in TOML"""

    def run(self) -> None:
        from esper.karn.garden import show_tasks

        show_tasks(self.suite)


@dataclass(frozen=True, kw_only=True)
class Atlas:
    """Measure what every single seed gains in every context of a suite, or show what is known.

    An arm is a slot, a blueprint, a blend and an epoch; all arms are played on several seeds."""

    suite: Name = "garden"
    """garden, garden_mlp, or the path of a suite in TOML"""
    show: bool = False
    """print the stored atlas; measure nothing"""
    out: Path | None = None
    """directory for the atlas; by default atlas-SUITE in the current one"""
    seeds: int = 8
    """cases of every context"""
    epochs: tuple[int, ...] = (4, 9, 15)
    """when to plant"""
    schedules: bool = False
    """also search schedules of several seeds: the oracle's, and the best constant one"""
    rows: int = 64
    """hosts that train together; a GPU is best filled with thousands"""
    device: str = "cpu"
    """cpu or cuda"""
    json: Path | None = None
    """write the summary as one flat object"""

    def run(self) -> None:
        from esper.karn.garden import run_atlas

        run_atlas(self)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Play controllers on the same cases and compare them on test data.

    Interrupt it at any time: with the same --out it goes on where it was."""

    controllers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]")] = (
        "never",
        "random",
        "heuristic",
    )
    """never, random, heuristic, periodic, plateau, gap, race, best_constant, oracle,
    fixed:slot=early,blueprint=conv,..., or the directory of a run"""
    suite: Name = "garden_mlp"
    """garden, garden_mlp, or the path of a suite in TOML"""
    group: Name = "training"
    """training, or a group of held-out contexts: task, host, lesion"""
    seeds: int = 4
    """cases of every context"""
    rent: float = 2.0
    """points for 100 %% of the host's parameters over a whole episode"""
    out: Path | None = None
    """file for every episode's result, one line of JSON each"""
    rows: int = 64
    """hosts that train together"""
    device: str = "cpu"
    """cpu or cuda"""
    json: Path | None = None
    """write the table as one flat object"""
    quiet: bool = False
    """no progress"""

    def run(self) -> None:
        from esper.karn.garden import run_evaluation

        run_evaluation(self)
