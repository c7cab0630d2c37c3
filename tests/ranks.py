"""Command lines in several processes that torch's launcher starts together, as forks.

What `torchrun` does with new interpreters, which take longer to start than what is tested.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path

from esper.leyline.errors import EsperError
from esper.simic.training.run_processes import launch
from tests import programs
from tests.simic.training.short_runs import fork_processes, shorten_epochs

CODE = f"from {__name__} import start; start()"
ESPER = "esper.karn.cli:main"


def torchrun(
    size: int, program: str, *words: object, cwd: Path | None = None, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    """A function, as MODULE:NAME, with these words as arguments in so many processes, as torchrun
    would start them; epochs are short. One process is not launched."""
    given = json.dumps([str(word) for word in words])
    return programs.run(CODE, size, program, given, restarts, cwd=cwd)


def start() -> None:
    size, program, words = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    shorten_epochs()
    if size == 1:
        raise SystemExit(run(program, words))
    fork_processes(restarts=int(sys.argv[4]))
    try:
        raise SystemExit(launch(run, program, words, size=size))
    except EsperError as error:
        print(f"esper: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def run(program: str, words: list[str]) -> int:
    """What each process does; its exit code."""
    sys.argv = [program, *words]
    module, _, name = program.partition(":")
    try:
        getattr(importlib.import_module(module), name)()
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 1
    return 0
