"""What commands show and write: progress, tables, and figures as one flat object."""

import json
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from esper.garden.statistics import Estimate
from esper.leyline.errors import DataError, printable

SECONDS_BETWEEN_LINES = 10.0
REPR_WIDTH = 100  # characters of an object's one-line representation
WIDTH = 110  # of a terminal, at least, for tables that need it


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A bar in a terminal, plain lines elsewhere, nothing when asked.

    Yields a function that is told what is done; it may be called as often as one likes.
    """
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


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, in columns of plain text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def shortened(text: str, width: int, *, keep_end: bool = False) -> str:
    """Cut a text to one line of this many characters, with an ellipsis where something is missing.

    Args:
        text: Text to be shortened; line breaks become spaces.
        width: Number of characters, at least 1.
        keep_end: Cut the beginning off, as for paths of which the end matters.
    """
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    if keep_end:
        return "…" + line[len(line) - width + 1 :]
    return line[: width - 1] + "…"


def one_line_repr(value: object, text: str) -> str:
    """Describe an object in one line, as `<Class text>` of at most `REPR_WIDTH` characters."""
    name = type(value).__name__
    return f"<{name} {shortened(text, REPR_WIDTH - len(name) - 3)}>"


def show_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    right: Container[str] = (),
    fold: Container[str] = (),
    wide: bool = False,
) -> None:
    """Print rows of anything; of the columns some are numbers to the right, some may be broken.

    `wide`: wide enough for what may not, also where output goes to a file.
    """
    table = Table(title=title, box=box.SIMPLE)
    for name in columns:
        justify: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(escape(name), justify=justify, no_wrap=name not in fold, overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    Console(width=max(WIDTH, Console().width) if wide else None).print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{len(value)} bytes" if isinstance(value, bytes) else escape(printable(str(value)))


def require_writable(file: Path | None) -> None:
    """Say at once that a file cannot be written, not after hours."""
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise DataError(f"{file} cannot be written", valid="a file in a directory that exists")


def flat_estimate(name: str, estimate: Estimate) -> dict[str, float]:
    """A number and its interval, under names of their own."""
    return {name: estimate.value, f"{name}_lo": estimate.low, f"{name}_hi": estimate.high}


def write_flat(path: Path | None, figures: Mapping[str, float]) -> None:
    """Write figures as one flat object of JSON, if a file was named."""
    if path is None:
        return
    path.write_text(json.dumps(dict(figures), indent=1) + "\n", encoding="utf-8")


def duration(seconds: float | None) -> str:
    """A span of time in words."""
    if seconds is None:
        return "not recorded"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def listed(parts: Sequence[str]) -> str:
    """At least one thing, in words."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
