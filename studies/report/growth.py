"""Does growth pay? What the raw results of that study say, as numbers.

Shapes: `C` contexts, `E` seeds of each.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from esper.garden.evaluation import Result
from esper.garden.statistics import Estimate, mean, mean_interval
from esper.leyline.errors import DataError
from studies.comparisons import paired_difference
from studies.cubes import Array, Results, read_results
from studies.folders import RESULTS, read_description
from studies.growth_pays import (
    CONSTANT,
    GROWN,
    GROWN_TUNED,
    NAMES,
    NEVER,
    RANDOM_GROWTH,
    SCRATCH,
    SCRATCH_FLOPS,
    SCRATCH_PLAIN,
    SMALL,
    SMALL_FLOPS,
)

PEER = "gromo.json"  # of benchmarks/peers/gromo_peer.py, where it was run
FROM_SCRATCH = (SCRATCH_PLAIN, SCRATCH, SCRATCH_FLOPS)
PEER_KEYS = ("library", "version", "context", "epochs", "budget", "runs")


@dataclass(frozen=True)
class Trained:
    """One way to train, in one context."""

    name: str
    test: Estimate  # percent
    parameters: float  # of the network at the end
    flops: float  # of training
    epochs: int
    rate: float
    start: str | None  # of seeds that were there from the beginning


@dataclass(frozen=True)
class Peer:
    """What another library reached on the same host and data."""

    name: str
    context: str
    tests: Sequence[float]  # percent, one for each seed
    parameters: float
    rate: float
    epochs: int


class GrowthStudy:
    """A study's folder: networks that grew and what they are compared with, by context."""

    GROWN: ClassVar[str] = GROWN
    TUNED: ClassVar[str] = GROWN_TUNED
    rivals: ClassVar[tuple[str, ...]] = (
        NEVER, SMALL, SCRATCH_PLAIN, SCRATCH, SMALL_FLOPS, SCRATCH_FLOPS, CONSTANT, RANDOM_GROWTH,
    )  # fmt: skip

    def __init__(
        self,
        results: Sequence[Result],
        description: Mapping[str, Any],
        peer: Mapping[str, Any] | None = None,
    ) -> None:
        self.description = description
        self.results = Results(results)
        self.contexts = list(description["contexts"])
        self.results.require_paired(NAMES, self.contexts)
        self.seeds = int(self.tests(GROWN, self.contexts).shape[2])
        self.peers = [] if peer is None else _peers(peer)

    @classmethod
    def read(cls, folder: Path) -> "GrowthStudy":
        description = read_description(folder)
        if "contexts" not in description:
            raise DataError(f"The description of the study in {folder} lacks its contexts")
        return cls(read_results(folder / RESULTS), description, _read_peer(folder / PEER))

    def about(self, context: str) -> Mapping[str, Any]:
        """What was grown there, and what the opponents chose."""
        known: Mapping[str, Any] = self.description["contexts"][context]
        return known

    def lines(self, context: str) -> list[Trained]:
        return [self._line(name, context) for name in NAMES]

    def _line(self, name: str, context: str) -> Trained:
        about = self.about(context)
        chosen = about["chosen"].get(GROWN if name == GROWN_TUNED else name, {})
        if name == GROWN:
            chosen = {}
        added = self.results.cube([name], [context], lambda result: result.added)
        flops = self.results.cube([name], [context], lambda result: result.flops)
        return Trained(
            name=name,
            test=mean_interval(self.tests(name, [context])),
            parameters=about["host_parameters"] + float(added.mean()),
            flops=float(flops.mean()),
            epochs=int(chosen.get("epochs", self.description["horizon"])),
            rate=float(chosen.get("rate", self.description["rate"])),
            start=chosen.get("start") if name in FROM_SCRATCH else None,
        )

    def tests(self, name: str, contexts: Sequence[str]) -> Array:
        """[1, C, E] percent."""
        return self.results.cube([name], contexts, lambda result: result.test)

    def lead(self, who: str, over: str, context: str | None = None) -> Estimate:
        """Points of test accuracy over another way, paired by seed; of all contexts by default."""
        contexts = self.contexts if context is None else [context]
        mine, theirs = (self.tests(name, contexts) for name in (who, over))
        return paired_difference(mine, theirs, statistic=mean)


def _read_peer(path: Path) -> Mapping[str, Any] | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read", given=error) from error
    if not isinstance(found, dict) or any(key not in found for key in PEER_KEYS):
        raise DataError(
            f"{path} does not hold results of another library", valid=", ".join(PEER_KEYS)
        )
    return found


def _peers(stored: Mapping[str, Any]) -> list[Peer]:
    """One line for each activation: seeds that were reported, at the rate that was chosen."""
    peers = []
    for activation in dict.fromkeys(run["activation"] for run in stored["runs"]):
        runs = [
            run
            for run in stored["runs"]
            if run["activation"] == activation and run["phase"] == "test"
        ]
        if not runs or not all(math.isfinite(run["test"]) for run in runs):
            raise DataError(f"The other library has no usable results with {activation!r}")
        peers.append(
            Peer(
                name=f"{stored['library']} {stored['version']}, {activation}",
                context=str(stored["context"]),
                tests=[float(run["test"]) for run in runs],
                parameters=sum(run["parameters"] for run in runs) / len(runs),
                rate=float(runs[0]["rate"]),
                epochs=int(stored["epochs"]),
            )
        )
    return peers
