"""How a run of `grow` goes while it goes, from Python and on the command line.

A terminal has a display that renews itself, a notebook the latest lines, and whatever else a plain
line for every epoch. Imports neither torch nor matplotlib.
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from typing import Any, TextIO

from rich.console import Console, Group
from rich.errors import LiveError
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from esper.show.growth_facts import ShownEpoch
from esper.show.palette import STAGE_COLOURS
from esper.show.terminal import duration

LINES = 15  # of a notebook's cell


class GrowthProgress:
    """Shows the epochs of one run as it is called with them, until it is closed."""

    def __init__(self, stream: TextIO | None, *, epochs: int, params: int, about: str = "") -> None:
        """`about`: a line that is said once, of where it runs and what a score is."""
        self.stream, self.epochs, self.params, self.about = stream, epochs, params, about
        self.seen, self._began = 0, time.monotonic()  # epochs, since then
        self._show: Callable[[ShownEpoch], None] = lambda epoch: self._say(self.line(epoch))
        self._say: Callable[[str], None] = self._print
        self._closing = ExitStack()
        self._lines: list[str] = []  # the latest
        console = None if self.stream is None else Console(file=self.stream)
        if self.stream is None:  # programs without a console have none
            self._say = lambda told: None
        elif (display := _notebook()) is not None:
            handle = display({"text/plain": "training …"}, raw=True, display_id=True)
            self._say = partial(self._renew, handle)
        elif console is not None and console.is_terminal and not console.is_dumb_terminal:
            self._show = self._live(console) or self._show

    def close(self) -> None:
        self._closing.close()

    def __call__(self, epoch: ShownEpoch) -> None:
        self.seen += 1
        with suppress(OSError, ValueError):  # whoever watched has left; training goes on
            self._show(epoch)

    def say(self, told: str) -> None:
        """A line between two epochs."""
        with suppress(OSError, ValueError):
            self._say(told)

    def line(self, epoch: ShownEpoch) -> str:
        """An epoch in one line: figures, what was decided or passed with time, and time left."""
        facts = [
            f"epoch {epoch.number}/{self.epochs}",
            f"loss {epoch.train_loss:.4f}, validation {epoch.val_loss:.4f}",
            f"score {epoch.score:.2f}",
            f"{epoch.added:,} parameters in seeds",
            *epoch.news,
        ]
        left = self.epochs - epoch.number
        if left and self.seen:
            spent = (time.monotonic() - self._began) / self.seen
            facts.append(f"{duration(left * spent)} left")
        return " · ".join(facts)

    def _print(self, told: str) -> None:
        about = [self.about] if self.about and not self._lines else []
        self._lines = [told]
        print(*about, told, sep="\n", file=self.stream, flush=True)

    def _renew(self, handle: Any, told: str) -> None:
        self._lines = [*self._lines[1 - LINES :], told]
        handle.update({"text/plain": "\n".join([self.about, *self._lines]).strip()}, raw=True)

    def _live(self, console: Console) -> Callable[[ShownEpoch], None] | None:
        """A bar, the figures and the seeds, renewed; what was decided stays above."""
        counted = TextColumn("epoch {task.completed}/{task.total}")
        bar = Progress(counted, BarColumn(), TimeRemainingColumn(), console=console)
        task = bar.add_task("", total=self.epochs)
        live = Live(bar, console=console)
        try:
            self._closing.enter_context(live)
        except LiveError:  # one of the caller's own is there
            return None
        self._say = lambda told: live.update(Group(bar, Text(told)), refresh=True)

        def show(epoch: ShownEpoch) -> None:
            bar.update(task, completed=epoch.number)
            for news in epoch.news:
                console.print(f"after epoch {epoch.number}: {news}", markup=False, highlight=False)
            live.update(Group(bar, *self._details(epoch)), refresh=True)

        return show

    def _details(self, epoch: ShownEpoch) -> list[Text]:
        """The figures of an epoch, and a line for each seed in the colour of its stage."""
        figures = (
            f"loss {epoch.train_loss:.4f} · validation {epoch.val_loss:.4f} · "
            f"score {epoch.score:.2f} · {self.params:,} + {epoch.added:,} parameters"
        )
        seeds = [
            Text(f"  ● {state} ", style=STAGE_COLOURS[state.stage])
            for state in epoch.slots
            if state.blueprint
        ]
        return [Text(figures), *seeds, *([Text(self.about)] if self.about else [])]


def _notebook() -> Callable[..., Any] | None:
    """The function that displays something in a notebook, if this runs in one."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if not hasattr(shell, "kernel"):  # a terminal's IPython is a terminal
        return None
    display: Callable[..., Any] = import_module("IPython.display").display
    return display
