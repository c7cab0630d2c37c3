"""What a study leaves in its folder: raw results, a description, and when to stop for today."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from esper.archive import KeptFolder, RunKind
from esper.distributed import SINGLE_PROCESS
from esper.garden.dealing import Ranks
from esper.leyline.errors import DataError

RESULTS = "results.jsonl"  # one line for every episode that the tables are made of
DESCRIPTION = RunKind.STUDY

Tell = Callable[[str, int, int], None]  # what is being done, how many are done, of how many


class StudyFolder(KeptFolder):
    """The folder of a study; what is kept in it is not made again. Of `ranks` the first writes."""

    kind, error = RunKind.STUDY, DataError

    def __init__(self, path: str | Path, ranks: Ranks = SINGLE_PROCESS) -> None:
        super().__init__(path)
        self.ranks = ranks

    @contextmanager
    def locked(self) -> Iterator[int]:
        if self.ranks.rank > 0:
            yield -1
            return
        try:
            with super().locked() as lock:
                yield lock
        except OSError as error:
            raise DataError(
                f"A study cannot be kept in {self.path}",
                given=error.strerror,
                valid="a folder of yours",
            ) from error

    def read_or_none(self, name: str) -> dict[str, Any] | None:
        """What was kept under this name, if anything was."""
        return self.read(name) if (self.path / name).exists() else None

    def write(self, name: str, what: Mapping[str, Any]) -> None:
        if self.ranks.rank == 0:
            super().write(name, what)

    def kept(self, name: str, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """What was kept under this name, or is made now, by all ranks together, and kept."""
        first = self.ranks.rank == 0
        if not self.ranks.all_gather_object(first and (self.path / name).exists())[0]:
            self.write(name, make())
        found = self.ranks.all_gather_object(self.read(name) if first else {})[0]
        return dict(found)


def read_description(folder: Path) -> dict[str, Any]:
    """The description of a study that was run, as written."""
    study = StudyFolder(folder)
    study.require_run(
        "holds no finished study",
        fix="run the study, or let it finish: the same command goes on where it was",
    )
    return study.read(DESCRIPTION)


class Clock:
    """Says when the time that a part of a study may take is over."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end
