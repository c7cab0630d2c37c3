"""An hour of training and of growing, tiny and side by side: what grows that should not.

    python -m tests.faults.soak [SECONDS [train|grow]]

Each works in one process, again and again; ten times its memory, open files and files on disk
with their size are written down. A leak is what goes on growing.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import esper
from esper.garden import episodes
from esper.simic.training import train_run
from tests.simic.training.tiny import BATCHES, tiny_run

X = torch.randn(256, 6, generator=torch.Generator().manual_seed(0))
DATA = (X, (X.sum(1) > 0).long())


def train(home: Path, number: int) -> None:
    """Rounds of one long run: more of them each time."""
    from dataclasses import replace

    from esper.archive import write_whole
    from esper.simic.training import RunFolder, to_toml

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


def measured(home: Path) -> tuple[float, int, int, float]:
    """MiB in memory, open files, files on disk, MiB on disk."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    files = [each for each in home.rglob("*") if each.is_file()]
    size = sum(each.stat().st_size for each in files) / 2**20
    memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return memory, len(os.listdir("/proc/self/fd")), len(files), size


def soak(name: str, work: Callable[[Path, int], None], seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="esper-soak-") as folder:
        home, number, began = Path(folder), 0, time.monotonic()
        due = 0.0
        print(f"| {name} | minutes | times | memory, MiB | open files | files | disk, MiB |")
        print("|---|---|---|---|---|---|---|")
        while (spent := time.monotonic() - began) < seconds or number == 0:
            work(home, number)
            number += 1
            if spent >= due:
                memory, handles, files, size = measured(home)
                row = (f"{spent / 60:.1f}", number, f"{memory:.0f}", handles, files, f"{size:.1f}")
                print(f"| | {' | '.join(map(str, row))} |", flush=True)
                due += seconds / 10
        left = sorted(each.name for each in home.rglob(".*"))
        print(f"\nleft behind: {', '.join(left) or 'nothing'}\n", flush=True)


WORKS = {"train": train, "grow": grow}


def main(seconds: str = "3600", *names: str) -> None:
    torch.set_num_threads(1)
    episodes.GARDEN_BATCHES = BATCHES
    for name in names:
        soak(name, WORKS[name], float(seconds))
    if not names:
        words = [sys.executable, "-m", "tests.faults.soak", seconds]
        started = [subprocess.Popen([*words, name], stdout=subprocess.PIPE) for name in WORKS]
        for each in started:
            print(each.communicate()[0].decode(), flush=True)
        sys.exit(any(each.returncode for each in started))


if __name__ == "__main__":
    main(*sys.argv[1:])
