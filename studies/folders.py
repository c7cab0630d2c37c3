"""What a study leaves in its folder: raw results, a description, and when to stop for today."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from esper.leyline.errors import DataError

RESULTS = "results.jsonl"  # one line for every episode that the tables are made of
DESCRIPTION = "study.json"

Tell = Callable[[str, int, int], None]  # what is being done, how many are done, of how many


def write_description(folder: Path, description: Mapping[str, Any]) -> None:
    """Replace the folder's description in a single rename."""
    temporary = folder / f"{DESCRIPTION}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, folder / DESCRIPTION)
    except OSError as error:
        raise DataError(
            f"A study cannot be kept in {folder}", given=error.strerror, valid="a folder of yours"
        ) from error


def read_description(folder: Path) -> dict[str, Any]:
    """The description of a study that was run, as written."""
    path = folder / DESCRIPTION
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{folder} holds no finished study",
            given=f"no {DESCRIPTION} in it",
            fix="run the study, or let it finish: the same command goes on where it was",
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read", given=error) from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is not the description of a study", given=type(found).__name__)
    return found


class Clock:
    """Says when the time that a part of a study may take is over."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end
