"""The matrix of faults: a sample with every test, and all of it with `make fault`.

Every operation and every fault are in the sample. With ESPER_MATRIX all cells are tried, in parts
that run side by side and add their counts to the file it names, for docs/reliability.md.
"""

import fcntl
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import esper.api
import esper.karn.grow_commands
import esper.karn.train_commands
from esper.simic.training import RunFolder
from tests.faults.matrix import FAULTS, Cell, Operation, cells_of, silent, try_cell, undisturbed
from tests.karn.own_files import MODEL, table
from tests.simic.training.tiny import kept, tiny_files

WHOLE = os.environ.get("ESPER_MATRIX")
NAMES = ("train", "grow", "export", "report", "audit", "evaluate")
SIDE_BY_SIDE = 4  # parts of an operation's cells
PARTS = [(name, part) for name in NAMES for part in range(SIDE_BY_SIDE if WHOLE else 1)]
QUICK = "class Quick(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
QUICK += "        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))\n\n"
QUICK += "    def forward(self, x):\n        return self.body(x)\n"


def hashes(*files: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def grown(folder: Path) -> Any:
    """Weights, optimiser and all that happened; the folder's name is in none of it."""
    report = esper.api.read_report(folder / "run")
    # What the run is; a file that it was in before may lie there until the next one is written.
    manifest = json.loads((folder / "run" / "checkpoint" / "manifest.json").read_text())
    return {
        "tensors": manifest["body"]["file"],
        "after": report.after,
        "epochs": len(report.epochs),
    }


def audited(folder: Path) -> Any:
    found = json.loads((folder / "audit" / "audit.json").read_text())
    return {name: value for name, value in found.items() if name != "seconds"}


def evaluated(folder: Path) -> Any:
    lines = (folder / "results.jsonl").read_text().splitlines()
    return sorted(lines)


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Operation]:
    home = tmp_path_factory.mktemp("matrix")
    (home / "net.py").write_text(MODEL + QUICK, encoding="utf-8")
    np.savez(home / "table.npz", **table())
    settings = tiny_files(home, rounds=1, checkpoint_every=1)
    own: list[object] = [f"{home}/net.py:Quick", "--data", home / "table.npz", "--quiet"]
    own += ["--budget.params", "none"]
    brief = ["--budget.epochs", "2", "--lr", "0.02", "--controller", "periodic:first=0"]
    train = ["train", "demo", "--file", settings, "--quiet", "--out"]

    def nothing(folder: Path) -> None: ...

    def with_run_of(name: str) -> Callable[[Path], None]:
        return lambda folder: shutil.copytree(
            undisturbed(made[name]).folder / "run", folder / "run"
        )

    made = {
        each.name: each
        for each in (
            Operation("train", lambda f: [*train, f / "run"], nothing,
                      lambda f: kept(RunFolder(f / "run")), home),
            Operation("grow", lambda f: ["grow", *own, *brief, "--out", f / "run"], nothing,
                      grown, home),
            Operation("export", lambda f: ["export", f / "run", "--out", f / "python"],
                      with_run_of("grow"), lambda f: hashes(*(f / "python").iterdir()), home),
            Operation("report", lambda f: ["report", f / "run", "--out", f / "page"],
                      with_run_of("train"), lambda f: hashes(*(f / "page").iterdir()), home),
            Operation("audit", lambda f: ["audit", *own, "--epochs", "1", "--out", f / "audit"],
                      nothing, audited, home),
            Operation("evaluate", lambda f: ["evaluate", "--suite", home / "tiny.toml", "--seeds",
                      "1", "--controllers", "never", "--quiet", "--out", f / "results.jsonl"],
                      nothing, evaluated, home),
        )
    }  # fmt: skip
    return made


def sample(name: str, every: list[Cell]) -> list[Cell]:
    """A fault of its own for each operation, and another for those with the most places."""
    number, draw = NAMES.index(name), random.Random(name)
    faults = [
        list(FAULTS)[(number + more) % len(FAULTS)] for more in ((0, 2) if number < 2 else (0,))
    ]
    return [draw.choice([cell for cell in every if cell.fault == fault]) for fault in faults]


def add_counts(file: Path, name: str, places: int, cells: list[Cell], failures: int) -> None:
    """Add what a part came to; others may be doing the same."""
    with file.open("a+", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        found = json.loads(stream.read() or '{"cells": 0, "failures": 0, "operations": {}}')
        found["cells"] += len(cells)
        found["failures"] += failures
        counts = found["operations"].setdefault(name, dict.fromkeys(FAULTS, 0) | {"places": places})
        for cell in cells:
            counts[cell.fault] += 1
        stream.truncate(0)
        stream.write(json.dumps(found, indent=1) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), PARTS)
def test_after_every_fault_what_is_advised_ends_as_if_nothing_had_happened(
    name: str, part: int, operations: dict[str, Operation]
) -> None:
    operation, failures = operations[name], []
    with silent():
        places = undisturbed(operation).places
        every = list(cells_of(operation, places))
        tried = every[part::SIDE_BY_SIDE] if WHOLE else sample(name, every)
        for number, cell in enumerate(tried):
            wrong = try_cell(operation, cell, number)
            if wrong is not None:
                file = cell.place.name.rpartition("/")[2]
                failures.append(f"{name}, {cell.place.event} {file}, {cell.fault}: {wrong}")
    if WHOLE:
        add_counts(Path(WHOLE), name, len(places), tried, len(failures))
    assert not failures, "\n".join(failures)
