"""Command lines in several processes that torch's launcher starts together, as forks.

What `torchrun` does with new interpreters, which take longer to start than what is tested.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from esper.simic.training.run_processes import launch
from tests import programs
from tests.simic.training.short_runs import fork_processes, shorten_epochs

CODE = f"from {__name__} import start; start()"


def torchrun(
    size: int, module: str, *words: object, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """As `torchrun --nproc-per-node SIZE -m MODULE WORDS...`, with short epochs; alone if 1."""
    return programs.run(CODE, size, module, json.dumps([str(word) for word in words]), cwd=cwd)


def start() -> None:
    size, module, words = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    shorten_epochs()
    if size == 1:
        raise SystemExit(run(module, words))
    fork_processes(restarts=0)
    raise SystemExit(launch(run, module, words, sizes=(size,)))


def run(module: str, words: list[str]) -> int:
    """What each process does; its exit code."""
    sys.argv = [module, *words]
    try:
        mains()[module]()
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 1
    return 0


def mains() -> dict[str, Callable[[], None]]:
    from esper.karn.cli import main

    return {"esper": main}
