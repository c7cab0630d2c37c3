"""The matrix of faults: a sample with every test, and all of it with `make fault`.

Every operation and every fault are in the sample. ESPER_MATRIX says how many cells, or "all"; with
ESPER_MATRIX_OUT the counts are written there, for docs/reliability.md.
"""

import hashlib
import json
import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import esper.api
import esper.karn.grow_commands
import esper.karn.train_commands
from esper.simic.training import RunFolder
from tests.faults.matrix import FAULTS, Cell, Operation, cells_of, run, silent, try_cell
from tests.karn.own_files import MODEL, table
from tests.simic.training.tiny import kept, tiny_files

CELLS = os.environ.get("ESPER_MATRIX", "8")
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
    own = [
        f"{home}/net.py:Quick",
        "--data",
        home / "table.npz",
        "--quiet",
        "--budget.params",
        "none",
    ]
    brief = ["--budget.epochs", "2", "--lr", "0.02", "--controller", "periodic:first=0"]

    def nothing(folder: Path) -> None: ...

    def with_run(folder: Path) -> None:
        shutil.copytree(home / "whole", folder / "run")

    def with_training(folder: Path) -> None:
        shutil.copytree(home / "trained", folder / "run")

    made = run(["grow", *own, *brief, "--out", home / "whole"], home / "nowhere")
    assert made.code == 0, made.said
    train = ["train", "demo", "--file", settings, "--quiet", "--out"]
    made = run([*train, home / "trained"], home / "nowhere")
    assert made.code == 0, made.said
    return {
        each.name: each
        for each in (
            Operation("train", lambda f: [*train, f / "run"], nothing,
                      lambda f: kept(RunFolder(f / "run")), home),
            Operation("grow", lambda f: ["grow", *own, *brief, "--out", f / "run"], nothing,
                      grown, home),
            Operation("export", lambda f: ["export", f / "run", "--out", f / "python"], with_run,
                      lambda f: hashes(*(f / "python").iterdir()), home),
            Operation("report", lambda f: ["report", f / "run", "--out", f / "page"],
                      with_training, lambda f: hashes(*(f / "page").iterdir()), home),
            Operation("audit", lambda f: ["audit", *own, "--epochs", "1", "--out", f / "audit"],
                      nothing, audited, home),
            Operation("evaluate", lambda f: ["evaluate", "--suite", home / "tiny.toml", "--seeds",
                      "1", "--controllers", "never", "--quiet", "--out", f / "results.jsonl"],
                      nothing, evaluated, home),
        )
    }  # fmt: skip


def chosen(every: list[Cell], draw: random.Random) -> list[Cell]:
    """A sample in which every operation and every fault are."""
    if CELLS == "all":
        return every
    draw.shuffle(every)
    first = {cell.operation: cell for cell in every} | {cell.fault: cell for cell in every}
    rest = [cell for cell in every if cell not in first.values()]
    return list(dict.fromkeys([*first.values(), *rest]))[: int(CELLS)]


@pytest.mark.slow
def test_after_every_fault_what_is_advised_ends_as_if_nothing_had_happened(
    operations: dict[str, Operation],
) -> None:
    began, clock = time.monotonic(), time.process_time()
    every: list[Cell] = []
    wanted: dict[str, Any] = {}
    places: Counter[str] = Counter()
    with silent():
        for operation in operations.values():
            folder = operation.folder("undisturbed"[:6])
            whole = run(operation.words(folder), folder)
            assert whole.code == 0, whole.said
            wanted[operation.name] = operation.result(folder)
            places[operation.name] = len(whole.places)
            every += cells_of(operation, whole.places)
        tried = chosen(list(every), random.Random(0))
        counts: Counter[tuple[str, str]] = Counter()
        failures = []
        for number, cell in enumerate(tried):
            operation = operations[cell.operation]
            wrong = try_cell(operation, cell, wanted[cell.operation], number)
            counts[cell.operation, cell.fault] += 1
            if wrong is not None:
                name = cell.place.name.rpartition("/")[2]
                what = f"{cell.operation}, {cell.place.event} {name}, {cell.fault}: {wrong}"
                failures.append(what)
                print(what, flush=True)
    spent = time.process_time() - clock
    if out := os.environ.get("ESPER_MATRIX_OUT"):
        table_of = {
            name: {fault: counts[name, fault] for fault in FAULTS} | {"places": places[name]}
            for name in operations
        }
        found = {"cells": len(every), "tried": len(tried), "failures": len(failures)}
        found |= {"minutes": round((time.monotonic() - began) / 60, 1), "operations": table_of}
        Path(out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"\n{len(tried)} of {len(every)} cells, {spent:.0f} s here")
    assert not failures
