"""An hour of training and of growing, tiny and side by side: what grows that should not.

    python -m tests.faults.soak [SECONDS [FILE]]

Each works in one process, again and again; sixty times its memory, open files, files on disk with
their size, and temporary files are counted. A leak is what goes on growing. What was counted is
written to FILE after every count, for docs/reliability.md.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any

import torch

import esper
from esper.archive import write_whole
from esper.garden import episodes
from esper.simic.training import RunFolder, to_toml, train_run
from tests.simic.training.tiny import BATCHES, tiny_run

X = torch.randn(256, 6, generator=torch.Generator().manual_seed(0))
DATA = (X, (X.sum(1) > 0).long())
COUNTS = 60  # over the whole time
COLUMNS = ("minutes", "times", "memory", "open files", "files", "disk", "temporary")


def train(home: Path, number: int) -> None:
    """Rounds of one long run: more of them each time."""
    path = home / "run"
    run = RunFolder.open(path) if path.exists() else tiny_run(path, rounds=1)
    write_whole(path / "config.toml", to_toml(replace(run.config, rounds=4 * (number + 1))))
    train_run(RunFolder.open(path))


def grow(home: Path, number: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    given = {"loss": "cross_entropy", "budget": "+200%", "controller": "periodic", "quiet": True}
    out = home / "run"
    if out.exists():
        for file in sorted(out.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
    esper.grow(model, DATA, DATA, epochs=8, seed=number, out=out, **given)


WORKS: dict[str, Callable[[Path, int], None]] = {"train": train, "grow": grow}


def counted(home: Path, temporary: Path) -> tuple[float, int, int, float, int]:
    """MiB in memory, open files, files on disk, MiB on disk, hidden and temporary files."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    files = [each for each in home.rglob("*") if each.is_file()]
    size = sum(each.stat().st_size for each in files) / 2**20
    memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    left = len([*home.rglob(".*"), *temporary.rglob("*")])
    return memory, len(os.listdir("/proc/self/fd")), len(files), size, left


def soak(name: str, seconds: float, told: "Queue[Any]") -> None:
    """Work for so long; a row is told for each count."""
    torch.set_num_threads(1)
    episodes.GARDEN_BATCHES = BATCHES
    with tempfile.TemporaryDirectory(prefix="esper-soak-") as folder:
        home, temporary = Path(folder, "home"), Path(folder, "temporary")
        home.mkdir()
        temporary.mkdir()
        tempfile.tempdir = str(temporary)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # torch's own, and it stays
        number, began, due = 0, time.monotonic(), 0.0
        while (spent := time.monotonic() - began) < seconds or number == 0:
            WORKS[name](home, number)
            number += 1
            if spent >= due:
                row = (spent / 60, number, *counted(home, temporary))
                told.put((name, [round(each, 2) for each in row]))
                due += seconds / COUNTS
        tempfile.tempdir = None
    told.put((name, None))


def main(seconds: str = "3600", file: str | None = None) -> None:
    spawned = multiprocessing.get_context("spawn")
    told = spawned.Queue()
    workers = [spawned.Process(target=soak, args=(name, float(seconds), told)) for name in WORKS]
    for worker in workers:
        worker.start()
    found: dict[str, list[Any]] = {name: [] for name in WORKS}
    working = len(workers)
    while working and all(worker.exitcode in (None, 0) for worker in workers):
        with suppress(Empty):
            name, row = told.get(timeout=1.0)
            working -= row is None
            found[name] += [row] if row else []
            print(name, *row or ["ended"], flush=True)
            if file is not None:
                write_whole(Path(file), json.dumps({"columns": COLUMNS, **found}) + "\n")
    for worker in workers:
        worker.join()
    sys.exit(any(worker.exitcode for worker in workers))


if __name__ == "__main__":
    main(*sys.argv[1:])
