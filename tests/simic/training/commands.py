"""The command line in a process of its own, on a tiny run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src"}


def esper(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "esper.karn.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=ENVIRONMENT,
        cwd=cwd,
    )


def started(*words: str | Path) -> subprocess.Popen[str]:
    """A command that Ctrl-C reaches, also where the tests themselves run in the background."""
    return subprocess.Popen(
        [sys.executable, "-m", "esper.karn.cli", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_until(happened: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def children_of(process: int) -> list[int]:
    """Processes that it started and that have not ended."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii")
    return [int(number) for number in found.split()]


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return state.rsplit(")", 1)[1].split()[0] != "Z"
