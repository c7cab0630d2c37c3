"""`esper` with short epochs, in which processes that learn together are forks.

A process that learns with the first one usually is a new interpreter, which takes longer than what
is tested of it; `test_two_processes_tell_everything_once` has a real one.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from esper.garden import episodes
from esper.simic.training import run_processes
from tests import programs
from tests.simic.training.tiny import BATCHES

COMMAND_LINE = (
    f"from {__name__} import shorten_epochs, fork_processes; shorten_epochs(); fork_processes(); "
    + programs.COMMAND_LINE
)


def esper(*words: object) -> subprocess.CompletedProcess[str]:
    """Run `esper words...` to its end."""
    return programs.run(COMMAND_LINE, *words)


def started(*words: object) -> programs.Program:
    """Start `esper words...`."""
    return programs.start(COMMAND_LINE, *words)


def shorten_epochs() -> None:
    episodes.GARDEN_BATCHES = BATCHES


def fork_processes() -> None:
    instead = SimpleNamespace(Popen=Fork, TimeoutExpired=subprocess.TimeoutExpired)
    run_processes.subprocess = instead  # type: ignore[assignment]


class Fork:
    """The part of `subprocess.Popen` that a run uses, for a fork that does as the words say."""

    def __init__(self, words: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> None:
        self.args, self.returncode = words, None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._become(pass_fds)
            finally:
                os._exit(1)

    def _become(self, kept: Sequence[int]) -> None:
        signal.set_wakeup_fd(-1)
        for place in (int(name) for name in os.listdir("/proc/self/fd")):
            if place > 2 and place not in kept:
                with contextlib.suppress(OSError):  # the listing had one too
                    os.close(place)
        os.setpgid(0, 0)
        sys.argv = list(self.args[2:])  # after python -m
        run_processes.main()
        os._exit(0)

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
