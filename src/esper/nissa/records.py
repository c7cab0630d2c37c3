"""What questions about a run are answered with, and how stored rows become that.

Blobs are read by name, packed rows as if they were not, stages step by step.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from esper.leyline.ops import LifecycleOp
from esper.leyline.stages import SeedStage
from esper.nissa.schema import Layout
from esper.nissa.store import BLOBS

Row = Mapping[str, Any]
_UNWATCHED: Row = dict.fromkeys(BLOBS)
_EMPTY = {stage.name for stage in (SeedStage.DORMANT, SeedStage.EMBARGOED, SeedStage.RESETTING)}


@dataclass(frozen=True)
class Table:
    """The answer to a query."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """One round: its episodes, and the evaluation after it if there was one."""

    round: int
    episodes: int
    mean_return: float | None
    net_gain: float | None  # mean, points
    rolled_back: int
    evaluations: Mapping[str, float]  # score of each controller


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """One decision, by name. Observation, legal actions and probabilities: watched rows only."""

    round: int
    step: int
    env: int
    actions: Mapping[str, str]  # of the heads that mattered
    value: float
    log_prob: float
    reward: float | None
    observation: Mapping[str, float] | None
    legal: Mapping[str, tuple[str, ...]] | None
    probabilities: Mapping[str, Mapping[str, float]] | None
    log_probs: Mapping[str, float] | None

    def __str__(self) -> str:
        chosen = ", ".join(f"{head} {action}" for head, action in self.actions.items())
        reward = "" if self.reward is None else f", reward {self.reward:+.3f}"
        return f"step {self.step}: {chosen} (value {self.value:+.3f}{reward})"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A slot at the end of a step, for a picture of slot × epoch."""

    step: int
    slot: str
    stage: str
    blueprint: str | None
    alpha: float | None  # of watched environments


@dataclass(frozen=True, kw_only=True)
class StoredEvent:
    """An event as the file has it."""

    id: int
    kind: str
    round: int
    step: int | None
    time: float
    rows: list[dict[str, Any]]


def by_name(blobs: Row, layout: Layout) -> dict[str, Any]:
    """The blobs of one environment as people read them."""
    return {
        kind.read_as or name: None if blobs[name] is None else kind.decode(blobs[name], layout)
        for name, kind in BLOBS.items()
    }


def unpacked(rows: Iterable[Row]) -> Iterable[tuple[int, int, str, dict[str, Any]]]:
    """(round, step, table, arrays by name) of rows of `packs`, which are in the key's order."""

    def key(row: Row) -> tuple[int, int, str, int]:
        return row["round"], row["step"], row["kind"], row["first"]

    for (number, step, kind, _), group in groupby(rows, key):
        arrays = {row["name"]: np.frombuffer(row["data"], row["dtype"]) for row in group}
        yield number, step, kind, arrays


def packed_rows(rows: Iterable[Row], env: int | None = None) -> Iterable[tuple[str, Row]]:
    """(table, row) of every environment in rows of `packs`, or of one environment."""
    for number, step, table, arrays in unpacked(rows):
        found = arrays["env"]
        places = range(len(found)) if env is None else np.flatnonzero(found == env)
        for place in places:
            row = {name: array[place].item() for name, array in arrays.items()}
            # What is not measured is NULL in a table.
            yield (
                table,
                {"round": number, "step": step}
                | {name: None if value != value else value for name, value in row.items()},
            )


def blobs_by_environment(row: Row) -> dict[int, dict[str, bytes | None]]:
    """A row of `observations`, apart: each watched environment's own part of every blob."""
    envs = np.frombuffer(row["envs"], "<i4").tolist()
    found: dict[int, dict[str, bytes | None]] = {env: {} for env in envs}
    for name in BLOBS:
        blob = row[name]
        width = 0 if blob is None else len(blob) // max(len(envs), 1)
        for place, env in enumerate(envs):
            found[env][name] = None if blob is None else blob[place * width : (place + 1) * width]
    return found


def named_actions(row: Row, layout: Layout) -> dict[str, str]:
    """The actions of the heads that mattered for the op of a row of `decisions`."""
    matters = layout.relevance[row[layout.heads[0]]]
    return {
        head: names[row[head]]
        for head, names, relevant in zip(layout.heads, layout.actions, matters, strict=True)
        if relevant
    }


def decision_records(
    rows: Iterable[Row], rewards: Mapping[int, float], watched: Iterable[Row], layout: Layout
) -> list[DecisionRecord]:
    """From rows of `decisions`, rewards by step, and rows of `observations` of the same round."""
    blobs: dict[int, dict[int, dict[str, bytes | None]]] = {}
    for row in watched:
        blobs.setdefault(row["step"], {}).update(blobs_by_environment(row))
    joined = ({**row, **blobs.get(row["step"], {}).get(row["env"], _UNWATCHED)} for row in rows)
    return [
        DecisionRecord(
            round=row["round"],
            step=row["step"],
            env=row["env"],
            actions=named_actions(row, layout),
            value=row["value"],
            log_prob=row["log_prob"],
            reward=rewards.get(row["step"]),
            **by_name(row, layout),
        )
        for row in joined
    ]


def timeline_cells(
    decisions: list[DecisionRecord], changes: Iterable[Row], layout: Layout
) -> list[Cell]:
    """Stages from the changes, blueprints from the decisions that planted, alphas as observed.

    An observation is made before a decision, so the alpha at the end of a step is in the next.
    """
    by_step: dict[int, list[Row]] = {}
    for change in changes:
        by_step.setdefault(change["step"], []).append(change)
    stage = dict.fromkeys(layout.slots, SeedStage.DORMANT.name)
    blueprint: dict[str, str | None] = dict.fromkeys(layout.slots)
    cells = []
    for place, decision in enumerate(decisions):
        actions = decision.actions
        if actions.get("op") == LifecycleOp.GERMINATE.name and "slot" in actions:
            blueprint[actions["slot"]] = actions.get("blueprint")
        for change in by_step.get(decision.step, []):
            stage[change["slot"]] = change["after"]
        after = decisions[place + 1].observation if place + 1 < len(decisions) else None
        for slot in layout.slots:
            if stage[slot] in _EMPTY:
                blueprint[slot] = None
            cells.append(
                Cell(
                    step=decision.step,
                    slot=slot,
                    stage=stage[slot],
                    blueprint=blueprint[slot],
                    alpha=None if after is None else after.get(f"{slot}:alpha"),
                )
            )
    return cells
