"""`esper` with short epochs, in which processes that learn together are forks.

A process that learns with the first one usually is a new interpreter, which takes longer than what
is tested of it; `test_two_processes_log_every_event_once` has a real one.
"""

import subprocess

from esper.garden import episodes
from esper.simic.training import run_processes
from tests import programs
from tests.simic.training.tiny import BATCHES

COMMAND_LINE = (
    f"from {__name__} import shorten_epochs, fork_processes; shorten_epochs(); "
    f"fork_processes({{}}); {programs.COMMAND_LINE}"
)


def esper(*words: object) -> subprocess.CompletedProcess[str]:
    """Run `esper words...` to its end."""
    return programs.run(COMMAND_LINE.format(""), *words)


def started(*words: object, restarts: int = run_processes.MAX_RESTARTS) -> programs.Program:
    """Start `esper words...`."""
    return programs.start(COMMAND_LINE.format(restarts), *words)


def shorten_epochs() -> None:
    episodes.GARDEN_BATCHES = BATCHES


def fork_processes(restarts: int = run_processes.MAX_RESTARTS) -> None:
    run_processes.START_METHOD = "fork"
    run_processes.MAX_RESTARTS = restarts
