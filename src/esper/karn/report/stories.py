"""Episodes that are worth a look: the best, a typical one, the worst, and one that waited.

Shapes: `T` steps of an episode.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.constants import SCORED_EPOCHS
from esper.nissa import Cell, DecisionRecord, RunReader

Row = Mapping[str, Any]
Array = NDArray[np.float64]
Controls = Mapping[int, Sequence[Array]]  # curves [T] by the seed of a case

SAME_SCORE = 1e-6  # points

BEST, TYPICAL, WORST, WAITING = "best", "typical", "worst", "waiting"


@dataclass(frozen=True, kw_only=True)
class Story:
    """One episode, step by step."""

    kind: str
    episode: Row
    slots: tuple[str, ...]
    cells: Sequence[Cell]
    decisions: Sequence[DecisionRecord]
    accuracy: Array  # [T] percent, of the network as it is; NaN where it was not measured
    committed: Array  # [T] percent, of what is permanent
    alpha: Mapping[str, Array]  # [T] of each slot
    control: Array | None  # [T] percent, of the same case, never grown
    failure: tuple[int, str] | None  # step and reason of a rollback

    @property
    def steps(self) -> int:
        return len(self.accuracy)


def choose(episodes: Sequence[Row], plantings: Sequence[Row]) -> dict[str, Row]:
    """Episodes by what they are an example of; none is chosen twice."""
    grown = {(row["round"], row["env"]) for row in plantings}
    known = [row for row in episodes if row["net_gain"] is not None]
    waited = [row for row in known if (row["round"], row["env"]) not in grown]
    ranked = sorted(
        (row for row in known if (row["round"], row["env"]) in grown),
        key=lambda row: (row["net_gain"], row["round"], row["env"]),
    )
    chosen: dict[str, Row] = {}
    if ranked:
        chosen[BEST] = ranked[-1]
    if len(ranked) > 2:
        chosen[TYPICAL] = ranked[(len(ranked) - 1) // 2]
    if len(ranked) > 1:
        chosen[WORST] = ranked[0]
    if waited:
        often = Counter(row["context"] for row in waited).most_common(1)[0][0]
        chosen[WAITING] = next(row for row in reversed(waited) if row["context"] == often)
    return chosen


def read_stories(
    reader: RunReader, episodes: Sequence[Row], plantings: Sequence[Row], controls: Controls
) -> list[Story]:
    chosen = choose(episodes, plantings)
    stories = [_story(reader, kind, row, controls) for kind, row in chosen.items()]
    return [story for story in stories if story.cells]


def _story(reader: RunReader, kind: str, episode: Row, controls: Controls) -> Story:
    number, env = episode["round"], episode["env"]
    decisions = reader.decisions(number, env)
    measured = {row["step"]: row for row in reader.steps(number, env)}
    steps = max((*measured, *(each.step for each in decisions)), default=-1) + 1
    slots = reader.layout.slots

    def curve(name: str) -> Array:
        found = [measured.get(step, {}).get(name) for step in range(steps)]
        return np.array([np.nan if value is None else value for value in found], dtype=float)

    failures = reader.query(
        "SELECT step, reason FROM rollbacks WHERE round = ? AND env = ?", (number, env)
    ).rows
    return Story(
        kind=kind,
        episode=episode,
        slots=slots,
        cells=reader.timeline(number, env),
        decisions=decisions,
        accuracy=curve("accuracy"),
        committed=curve("committed"),
        alpha={slot: curve(f"alpha_{slot}") for slot in slots},
        control=_control(episode, controls),
        failure=failures[0] if failures else None,
    )


def _control(episode: Row, controls: Controls) -> Array | None:
    """The curve of the same case: of those with its seed, the one that ends in its score."""
    score = episode["control"]
    for curve in controls.get(episode["seed"], ()):
        if score is not None and abs(curve[-SCORED_EPOCHS:].mean() - score) < SAME_SCORE:
            return curve
    return None


def read_controls(run: Path) -> Controls:
    """Curves of never-grown cases from the latest checkpoint, empty where there is none.

    They are stored under a hash of their context and the seed of their case; behind the curve is
    the score on test data, which is not shown.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[int, list[Array]] = {}
    files = sorted(run.glob("checkpoints/round-*/state/tensors-*.safetensors"))
    try:
        for file in files[-1:]:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    if name.startswith("controls."):
                        curve = np.asarray(tensors.get_tensor(name), dtype=float)[:-1]
                        found.setdefault(int(name.rpartition(".")[2]), []).append(curve)
    except (OSError, ValueError, SafetensorError):  # a run in training drops old checkpoints
        return {}
    return found
