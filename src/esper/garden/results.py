"""Results of evaluation: one line of JSON for each episode, in a file that survives being cut off.

A file is only ever appended to, a whole batch at a time; a line that was cut off by a crash is
dropped, so evaluation goes on where it was.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from esper.archive import append_lines
from esper.leyline.constants import DEFAULT_RENT
from esper.leyline.errors import DataError

FORMAT = "esper results 2"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One episode of one controller. Scores are percent on test data, gains points."""

    controller: str
    made: str  # a fingerprint of the controller: another one may come under the same name
    context: str
    key: str  # of the context: equal where its numbers are
    seed: int
    scale: float  # points that count as 1 in this context
    test: float  # the committed network, mean of the last epochs
    control: float  # the same case, never grown
    validation: float
    area: float  # mean over all epochs of the committed network's validation score
    exposure: float  # share of the host's parameters added × share of the episode
    added: int  # parameters in fossilized seeds at the end
    seeds: int  # fossilized
    flops: float  # of training the episode's network
    interventions: int
    rolled_back: bool

    def net_gain(self, rent: float = DEFAULT_RENT) -> float:
        """Points over the control, less the rent."""
        return self.test - self.control - rent * self.exposure

    def score(self, rent: float = DEFAULT_RENT) -> float:
        """The net gain in units of what can be gained in its context."""
        return self.net_gain(rent) / self.scale

    @property
    def identity(self) -> tuple[str, str, str, int]:
        return self.controller, self.made, self.key, self.seed


class ResultFile:
    """Results in a file that grows."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """`settings` are what results depend on beside their case; another file's are refused."""
        self.path = path
        self.results: list[Result] = []
        header = json.dumps({"format": FORMAT, **settings}, sort_keys=True)
        try:
            if path.exists():
                self._read(header)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                append_lines(path, [header])
        except OSError as error:
            raise DataError(
                f"Results cannot be kept in {path}", given=error.strerror, valid="a file of yours"
            ) from error

    def add(self, results: Iterable[Result]) -> None:
        """Append a batch; it is on the disk when this returns."""
        fresh = list(results)
        append_lines(self.path, [json.dumps(asdict(result)) for result in fresh])
        self.results += fresh

    def _read(self, header: str) -> None:
        text = _text_of(self.path)
        whole, ended, rest = text.rpartition("\n")
        if not ended and header.startswith(text):  # not even its first line was finished
            self.path.write_text("", encoding="utf-8")
            append_lines(self.path, [header])
            return
        lines = whole.split("\n")
        if lines[0] != header:
            raise DataError(
                f"{self.path} holds results of another evaluation",
                given=lines[0][:200] or "an empty file",
                valid=header,
                fix="name another file, or ask for what it was made with",
            )
        if rest:  # the last batch was cut off
            with self.path.open("r+", encoding="utf-8") as stream:
                stream.truncate(len((whole + "\n").encode()))
        self.results = [parse(line, self.path, n + 2) for n, line in enumerate(lines[1:])]


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} does not hold results", given="a file that is not text") from error


def parse(line: str, path: Path, number: int) -> Result:
    """One line of a result file."""
    try:
        record = json.loads(line)
        names = {field.name for field in fields(Result)}
        if set(record) != names:
            raise ValueError(f"keys {sorted(set(record) ^ names)}")
        return Result(**record)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"Line {number} of {path} is not a result",
            given=str(error),
            fix="delete the file and evaluate anew",
        ) from error
