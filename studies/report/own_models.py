"""What `benchmarks/own.py` left of controllers on models of users' own.

A folder for every task, and in it a file for every training: of hosts that never grew, and of each
controller by a number, which `controllers.json` tells apart.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

NEVER = "never"
KEPT = ("test", "job", "grown", "flops", "shadow_flops", "tryouts")  # by who packs; not each sample


class OwnRun(NamedTuple):
    """One training."""

    controller: str
    task: str
    seed: int
    found: Mapping[str, Any]


def flops_of(run: Mapping[str, Any]) -> float:
    """Of a training with its shadows, and with all that was tried out."""
    tried = sum(tryout["flops"] for tryout in run.get("tryouts", []))
    return float(sum(run["flops"]) + sum(run["shadow_flops"]) + tried)


def cost_of(run: Mapping[str, Any], never: Mapping[str, Any]) -> float:
    """FLOPs of a training over those of the same host never grown. One that diverged was not
    counted, and cost no less than the host alone."""
    return max(flops_of(run) / max(flops_of(never), 1.0), 1.0)


def read_own(folder: Path) -> list[OwnRun]:
    """All there are, of tuning the hosts' rates none; none if nothing was trained."""
    return list(_runs(folder)) if (folder / "controllers.json").exists() else []


def _runs(folder: Path) -> Iterator[OwnRun]:
    names = json.loads((folder / "controllers.json").read_text(encoding="utf-8"))
    for file in sorted(folder.glob("*/*.json")):
        kind, seed, number = file.stem.split("-")
        if kind == NEVER or number in names:
            found = json.loads(file.read_text(encoding="utf-8"))
            yield OwnRun(names.get(number, kind), file.parent.name, int(seed), found)


def costs_of(runs: list[OwnRun]) -> dict[str, float]:
    """Of each controller's trainings, on average."""
    never = {(run.task, run.seed): run.found for run in runs if run.controller == NEVER}
    shares: dict[str, list[float]] = {}
    for run in runs:
        alone = never.get((run.task, run.seed))
        if run.controller != NEVER and alone is not None:
            shares.setdefault(run.controller, []).append(cost_of(run.found, alone))
    return {name: fmean(own) for name, own in shares.items()}
