"""Whole environment steps per second: a fused garden against gardens of one row, one by one.

    python benchmarks/garden.py                # CPU, one thread
    python benchmarks/garden.py --device cuda  # one GPU

A step is everything that a learner waits for: decisions carried out, an epoch of training,
validation, every seed's contribution, the governor, rewards, observations and masks. Both sides
play the same cases with the same random decisions in the same run; of the one by one side a sample
of rows is played. Controls are measured beforehand, for both. Ratios are what counts.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from _report import write_json, write_section
from rich.console import Console
from rich.table import Table

from esper.garden import Case, Context, Controls, Garden, find_suite
from esper.garden.episodes import EPOCHS_ALONE
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH
from esper.tamiyo.controllers import RandomLegal
from esper.tolaria.population_config import EpochRecord

SUITES = ("garden", "garden_mlp")
RATE = 0.3  # chance of a decision: slots fill up over an episode, as under a learner that explores
HEADER = (
    "suite",
    "N",
    "one by one, steps/s",
    "fused, steps/s",
    "ratio",
    "outside host training",
)


def finish(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True)
class Listed:
    """Row i plays the i-th case, again and again."""

    cases: tuple[Case, ...]

    @property
    def contexts(self) -> tuple[Context, ...]:
        return tuple({case.context.key: case.context for case in self.cases}.values())

    def __call__(self, row: int, episode: int) -> Case:
        return self.cases[row]


class Timed:
    """A garden whose steps are timed, and the training of hosts within them."""

    def __init__(self, cases: tuple[Case, ...], controls: Controls, device: str) -> None:
        self.garden = Garden(Listed(cases), len(cases), controls=controls)
        self.device, self.training, self.whole = device, 0.0, 0.0
        population = self.garden.population
        self._train = population.train_epoch
        population.train_epoch = self._timed  # type: ignore[method-assign]

    def _timed(self) -> EpochRecord:
        start = finish(self.device)
        record = self._train()
        self.training += finish(self.device) - start
        return record

    def play(self, epochs: int) -> None:
        """The first epochs of an episode, after those in which nothing can be planted."""
        garden, controller = self.garden, RandomLegal(rate=RATE)
        garden.reset()
        starts = torch.ones(garden.num_envs, dtype=torch.bool)
        for epoch in range(EPOCHS_ALONE + epochs):
            if epoch == EPOCHS_ALONE:
                self.training, start = 0.0, finish(self.device)
            garden.step(controller.act(garden.signals(), garden.legal(), starts))
            starts = torch.zeros_like(starts)
        self.whole = finish(self.device) - start


def measure(suite: str, rows: int, sample: int, epochs: int, device: str) -> dict[str, float]:
    contexts = find_suite(suite).training
    cases = tuple(Case(contexts[row % len(contexts)], row) for row in range(rows))
    controls = Controls(device=device)
    controls.require(cases)
    chosen = torch.linspace(0, rows - 1, sample).long().tolist()
    alone = 0.0
    for row in chosen[: sample // 2]:  # half before and half after: the machine may change
        alone += _alone(cases[row], controls, epochs, device)
    fused = Timed(cases, controls, device)
    fused.play(epochs)
    for row in chosen[sample // 2 :]:
        alone += _alone(cases[row], controls, epochs, device)
    fused_rate, alone_rate = rows * epochs / fused.whole, sample * epochs / alone
    return {
        "fused_vs_one_by_one": fused_rate / alone_rate,
        "outside_training_share": 1.0 - fused.training / fused.whole,
        "steps_per_second": fused_rate,
        "one_by_one_steps_per_second": alone_rate,
        "episodes_per_minute": 60.0 * fused_rate / DEFAULT_EPISODE_LENGTH,
    }


def _alone(case: Case, controls: Controls, epochs: int, device: str) -> float:
    timed = Timed((case,), controls, device)
    timed.play(epochs)
    return timed.whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--rows", type=int, default=64, help="environments of the fused garden")
    parser.add_argument("--sample", type=int, default=6, help="of them played one by one")
    parser.add_argument("--epochs", type=int, default=12, help="timed, of each episode")
    parser.add_argument("--json", type=Path, help="write the figures flat to this file")
    parser.add_argument("--write", action="store_true", help="update docs/performance.md")
    options = parser.parse_args()
    if not 1 <= options.epochs < DEFAULT_EPISODE_LENGTH - EPOCHS_ALONE:
        parser.error(f"--epochs is from 1 to {DEFAULT_EPISODE_LENGTH - EPOCHS_ALONE - 1}")
    torch.set_num_threads(1)
    flat: dict[str, float] = {}
    rows: list[list[str]] = []
    for suite in options.suites:
        found = measure(suite, options.rows, options.sample, options.epochs, options.device)
        flat |= {f"{suite}_{name}": value for name, value in found.items()}
        rows.append(
            [
                suite,
                str(options.rows),
                f"{found['one_by_one_steps_per_second']:,.1f}",
                f"{found['steps_per_second']:,.1f}",
                f"{found['fused_vs_one_by_one']:.1f}",
                f"{found['outside_training_share']:.0%}",
            ]
        )
    table = Table(*HEADER, title=f"whole environment steps, {options.device}")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    write_json(options.json, flat)
    if options.write:
        command = f"python benchmarks/garden.py --device {options.device} --write"
        write_section("garden", options.device, command, HEADER, rows)


if __name__ == "__main__":
    main()
