"""Results as arrays: what the statistics of a study work on.

Shapes: `R` trainings of a controller, `C` contexts, `E` episodes of each.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from esper.garden.evaluation import FORMAT, Result, parse
from esper.leyline.errors import DataError, UnknownNameError

Array = NDArray[np.float64]
Value = Callable[[Result], float]


def read_results(path: Path) -> list[Result]:
    """Every result of a file, whatever it was made with; a line that was cut off is left out.

    Where the file is not there but packed, as `results.jsonl.gz`, that one is read.
    """
    packed = path.with_name(f"{path.name}.gz")
    try:
        if packed.is_file() and not path.exists():
            text = gzip.decompress(packed.read_bytes()).decode("utf-8")
        else:
            text = path.read_text(encoding="utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise DataError(f"The results {path} cannot be read", given=reason) from error
    header, *lines = text.rpartition("\n")[0].split("\n")
    try:
        known = json.loads(header).get("format")
    except (ValueError, AttributeError):
        known = header[:80] or "an empty file"
    if known != FORMAT:
        raise DataError(f"{path} does not hold results of this version", given=known, valid=FORMAT)
    return [parse(line, path, number + 2) for number, line in enumerate(lines)]


class Results:
    """Results by controller, context and seed; of two for one episode the later one counts."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._found: dict[tuple[str, str], dict[int, Result]] = {}
        for result in results:
            self._found.setdefault((result.controller, result.context), {})[result.seed] = result

    @property
    def controllers(self) -> list[str]:
        """In the order in which they first appear."""
        return list(dict.fromkeys(controller for controller, _ in self._found))

    def has(self, controllers: Sequence[str], contexts: Sequence[str]) -> bool:
        """Was each of them played in all of these contexts?"""
        return bool(controllers) and all(
            (controller, context) in self._found
            for controller in controllers
            for context in contexts
        )

    def cube(
        self,
        controllers: Sequence[str],
        contexts: Sequence[str],
        value: Value,
        beside: Sequence[str] = (),
    ) -> Array:
        """A value of every result, [R, C, E]: `controllers` are trainings of one and the same.

        Only of the cases that those `beside` them played too.
        """
        self.require_paired(controllers, contexts)
        rows = []
        for controller in controllers:
            cells = []
            for context in contexts:
                found = self._episodes(controller, context)
                seeds = set(found).intersection(*(self._episodes(b, context) for b in beside))
                cells.append([float(value(found[seed])) for seed in sorted(seeds)])
            rows.append(cells)
        return np.asarray(rows, dtype=np.float64)

    def require_paired(self, controllers: Sequence[str], contexts: Sequence[str]) -> None:
        """Refuse controllers that were not all played on the same cases."""
        seeds = {
            tuple(sorted(self._episodes(controller, context))): f"{controller} in {context}"
            for controller in controllers
            for context in contexts
        }
        if len(seeds) > 1:
            raise DataError(
                "Not all controllers were played on the same cases",
                given=", ".join(f"{who}: {len(each)} cases" for each, who in seeds.items()),
                fix="let the study finish: the same command goes on where it was",
            )

    def _episodes(self, controller: str, context: str) -> dict[int, Result]:
        if (controller, context) not in self._found:
            known = [f"{who} in {where}" for who, where in self._found]
            raise UnknownNameError.of("result", f"{controller} in {context}", known)
        return self._found[controller, context]

    def first(self, controller: str, context: str) -> Result:
        """One result, for what is the same in all."""
        return next(iter(self._episodes(controller, context).values()))


def members(names: Sequence[str], kind: str) -> list[str]:
    """The trainings of a controller among the names: `kind-0`, `kind-1` and so on, in order."""
    numbered: Mapping[str, int] = {
        name: int(rest)
        for name in names
        for stem, _, rest in [name.rpartition("-")]
        if stem == kind and rest.isdigit()
    }
    return sorted(numbered, key=lambda name: numbered[name])
