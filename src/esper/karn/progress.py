"""Progress for people: a bar in a terminal, plain lines elsewhere, nothing when asked."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class Report(Protocol):
    def __call__(self, what: str, done: int, total: int) -> None: ...


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Report]:
    """Yields a function that is told what is done; it may be called as often as one likes."""
    if quiet:
        yield lambda what, done, total: None
    elif sys.stderr.isatty():
        columns = (
            TextColumn("{task.description:24.24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bars:
            known: dict[str, int] = {}

            def show(what: str, done: int, total: int) -> None:
                if what not in known:
                    known[what] = int(bars.add_task(what, total=total))
                bars.update(bars.task_ids[known[what]], completed=done, total=total)

            yield show
    else:
        last = {"at": 0.0}

        def say(what: str, done: int, total: int) -> None:
            now = time.monotonic()
            if done == total or now - last["at"] > SECONDS_BETWEEN_LINES:
                last["at"] = now
                print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

        yield say
