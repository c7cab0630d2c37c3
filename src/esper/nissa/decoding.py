"""Stored rows as people read them: blobs by name, stages step by step."""

from collections.abc import Iterable, Mapping
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from esper.leyline.ops import LifecycleOp
from esper.leyline.stages import SeedStage
from esper.nissa.layout import Layout
from esper.nissa.records import Cell, DecisionRecord

Row = Mapping[str, Any]
BLOBS = ("observation", "masks", "probabilities", "log_probs")
_UNWATCHED: Row = dict.fromkeys(BLOBS)


def observation_of(blob: bytes | None, layout: Layout) -> dict[str, float] | None:
    if blob is None:
        return None
    return dict(zip(layout.features, np.frombuffer(blob, "<f2").tolist(), strict=True))


def probabilities_of(blob: bytes | None, layout: Layout) -> dict[str, dict[str, float]] | None:
    if blob is None:
        return None
    parts = _split(np.frombuffer(blob, "<f2").tolist(), layout)
    return {head: dict(zip(names, part, strict=True)) for head, names, part in parts}


def legal_of(blob: bytes | None, layout: Layout) -> dict[str, tuple[str, ...]] | None:
    if blob is None:
        return None
    bits = np.unpackbits(
        np.frombuffer(blob, np.uint8), count=sum(layout.sizes), bitorder="little"
    ).tolist()
    return {
        head: tuple(name for name, bit in zip(names, part, strict=True) if bit)
        for head, names, part in _split(bits, layout)
    }


def log_probs_of(blob: bytes | None, layout: Layout) -> dict[str, float] | None:
    if blob is None:
        return None
    return dict(zip(layout.heads, np.frombuffer(blob, "<f4").tolist(), strict=True))


def _split(values: list[Any], layout: Layout) -> Iterable[tuple[str, tuple[str, ...], list[Any]]]:
    ends = accumulate(layout.sizes)
    for head, names, end in zip(layout.heads, layout.actions, ends, strict=True):
        yield head, names, values[end - len(names) : end]


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


def with_rewards(packed: Iterable[tuple[str, Row]]) -> list[Row]:
    """Packed decisions of one environment, as a query would join them."""
    tables: dict[str, list[Row]] = {"decisions": [], "steps": []}
    for table, row in packed:
        tables[table].append(row)
    rewards = {row["step"]: row["reward"] for row in tables["steps"]}
    return [{**row, "reward": rewards.get(row["step"])} for row in tables["decisions"]]


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
    rows: Iterable[Row], watched: Iterable[Row], layout: Layout
) -> list[DecisionRecord]:
    """From decisions with their rewards, and rows of `observations` of the same round."""
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
            reward=row["reward"],
            observation=observation_of(row["observation"], layout),
            legal=legal_of(row["masks"], layout),
            probabilities=probabilities_of(row["probabilities"], layout),
            log_probs=log_probs_of(row["log_probs"], layout),
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


_EMPTY = {stage.name for stage in (SeedStage.DORMANT, SeedStage.EMBARGOED, SeedStage.RESETTING)}
