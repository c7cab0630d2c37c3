"""Events as rows of tables: columns of plain Python values, made in the writer's thread.

Shapes: `N` environments, `W` watched ones, `K` those that were active, `H` heads, `A` actions of
the largest head.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import AgreementError
from esper.leyline.ops import Cause, LifecycleOp, cause_name
from esper.leyline.stages import SeedStage
from esper.nissa.events import (
    AnomalyFound,
    Decisions,
    Dropped,
    EpisodeEnded,
    Evaluated,
    Event,
    LifecycleChanged,
    Noted,
    RolledBack,
    RunStarted,
    Sampled,
    Stepped,
    UpdateMetrics,
)
from esper.nissa.layout import Layout

DEFAULT_ROWS = 256  # environments that have rows of their own
Columns = Mapping[str, Sequence[Any]]
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Rows:
    """Rows of one table, as columns of one length."""

    table: str
    columns: Columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


def rows_of(event: Event, layout: Layout, rows: int = DEFAULT_ROWS) -> list[Rows]:
    """What an event adds to the tables; round, step or event are added by the store.

    `rows`: of how many environments decisions and steps are rows; the others' are packed.
    """
    if isinstance(event, Decisions):
        return _decisions(event, layout, rows)
    if isinstance(event, Stepped):
        return _steps(event, rows)
    return _WRITERS[type(event)](event, layout)


def _by_environment(
    table: str, active: NDArray[np.intp], arrays: Arrays, rows: int, first: int
) -> list[Rows]:
    """Arrays [K] of the active environments as rows, and beyond the first ones as packs."""
    few = int(np.searchsorted(active, rows))
    made = [Rows(table, {name: array[:few].tolist() for name, array in arrays.items()})]
    if few < len(active):
        many = {name: array[few:] for name, array in arrays.items()}
        packs: dict[str, Sequence[Any]] = {
            "kind": [table] * len(many),
            "first": [first] * len(many),
            "name": list(many),
            "dtype": [array.dtype.str for array in many.values()],
            "data": [array.tobytes() for array in many.values()],
        }
        made.append(Rows("packs", packs))
    return made


def _decisions(event: Decisions, layout: Layout, rows: int) -> list[Rows]:
    count, heads = event.actions.shape
    if heads != len(layout.heads):
        raise AgreementError(
            "Decisions have another number of heads than the run",
            given=heads,
            valid=", ".join(layout.heads),
        )
    active = _chosen(event.active, count)
    arrays = {"env": (active + event.first_env).astype("<i4")}
    arrays |= dict(zip(layout.heads, event.actions[active].astype("<i4").T, strict=True))
    arrays["value"] = event.values[active].astype("<f4")
    arrays["log_prob"] = event.log_probs[active].astype("<f8").sum(1)
    made = _by_environment("decisions", active, arrays, rows, event.first_env)
    return made + _watched(event, active, layout)


def _watched(event: Decisions, active: NDArray[np.intp], layout: Layout) -> list[Rows]:
    """One row for all watched environments of a step: each blob holds an array over them."""
    parts = {
        "observation": _packed_observations(event.observations, layout),
        "masks": _packed_masks(event.masks, layout),
        "probabilities": _packed_probabilities(event.probabilities, layout),
    }
    watched = min((len(part) for part in parts.values() if part is not None), default=0)
    if not watched:
        return []
    active = active[active < watched]
    parts["log_probs"] = event.log_probs.astype("<f4")
    blobs: dict[str, Sequence[Any]] = {
        name: [None if part is None else part[active].tobytes()] for name, part in parts.items()
    }
    blobs["first"] = [event.first_env]
    blobs["envs"] = [(active + event.first_env).astype("<i4").tobytes()]
    return [Rows("observations", blobs)]


def _chosen(active: NDArray[np.bool_] | None, count: int) -> NDArray[np.intp]:
    """The rows that count, [K]."""
    return np.arange(count) if active is None else np.flatnonzero(active)


def _packed_observations(given: NDArray[Any] | None, layout: Layout) -> NDArray[Any] | None:
    if given is None:
        return None
    if given.shape[1] != len(layout.features):
        raise AgreementError(
            "Observations have another number of features than the run",
            given=given.shape[1],
            valid=len(layout.features),
        )
    with np.errstate(over="ignore"):  # beyond the range of float16 is infinite
        return given.astype("<f2")


def _actions_only(given: NDArray[Any], layout: Layout) -> NDArray[Any]:
    """[W, H, A] without the padding: [W, actions of all heads]."""
    if given.shape[1] != len(layout.heads) or given.shape[2] < max(layout.sizes):
        raise AgreementError(
            "Masks or probabilities do not have the run's heads",
            given=list(given.shape),
            valid=f"[environments, {len(layout.heads)}, {max(layout.sizes)}]",
        )
    return np.concatenate([given[:, head, :size] for head, size in enumerate(layout.sizes)], axis=1)


def _packed_masks(given: NDArray[Any] | None, layout: Layout) -> NDArray[Any] | None:
    if given is None:
        return None
    return np.packbits(_actions_only(given, layout), axis=1, bitorder="little")


def _packed_probabilities(given: NDArray[Any] | None, layout: Layout) -> NDArray[Any] | None:
    return None if given is None else _actions_only(given, layout).astype("<f2")


def _steps(event: Stepped, rows: int) -> list[Rows]:
    active = _chosen(event.active, len(event.rewards))
    arrays = {"env": (active + event.first_env).astype("<i4")}
    columns = {"reward": event.rewards}
    columns |= {f"reward_{name}": term for name, term in event.terms.items()}
    columns.update(event.measures)
    arrays |= {name: array[active].astype("<f8") for name, array in columns.items()}
    return _by_environment("steps", active, arrays, rows, event.first_env)


_STAGES = np.array([stage.name for stage in SeedStage], dtype=object)
_CAUSES = {int(cause): cause_name(cause) for cause in (*Cause, *LifecycleOp)}


def _lifecycle(event: LifecycleChanged, layout: Layout) -> list[Rows]:
    count = len(event.env)
    nothing = [None] * count
    columns = {
        "step": [event.step] * count,
        "env": event.env.tolist(),
        "slot": [layout.slot(slot) for slot in event.slot.tolist()],
        "before": _STAGES[event.before].tolist(),
        "after": _STAGES[event.after].tolist(),
        "cause": [_CAUSES[cause] for cause in event.cause.tolist()],
        "blueprint": nothing
        if event.blueprint is None
        else [layout.blueprint(index) for index in event.blueprint.tolist()],
        "reason": nothing if event.reason is None else event.reason,
    }
    return [Rows("lifecycle", columns)]


def _episodes(event: EpisodeEnded, layout: Layout) -> list[Rows]:
    count = len(event.env)
    columns: dict[str, Sequence[Any]] = {"step": [event.step] * count, "context": event.context}
    for name in (
        "env", "seed", "validation", "control", "net_gain", "returns", "added", "exposure",
        "interventions", "rolled_back", "test",
    ):  # fmt: skip
        value = getattr(event, name)
        columns[name] = [None] * count if value is None else value.tolist()
    return [Rows("episodes", columns)]


def _rollbacks(event: RolledBack, layout: Layout) -> list[Rows]:
    steps = [event.step] * len(event.env)
    return [Rows("rollbacks", {"step": steps, "env": event.env.tolist(), "reason": event.reason})]


def _runs(event: RunStarted, layout: Layout) -> list[Rows]:
    names = ("config", "versions", "seeds", "data")
    return [Rows("runs", {name: [json.dumps(getattr(event, name))] for name in names})]


def _updates(event: UpdateMetrics, layout: Layout) -> list[Rows]:
    return [Rows("updates", {"name": list(event.metrics), "value": list(event.metrics.values())})]


def _evaluations(event: Evaluated, layout: Layout) -> list[Rows]:
    count = len(event.score)
    columns: dict[str, Sequence[Any]] = {
        "controller": [event.controller] * count,
        "context": event.context,
    }
    for name in ("score", "low", "high", "episodes"):
        value = getattr(event, name)
        columns[name] = [None] * count if value is None else value.tolist()
    return [Rows("evaluations", columns)]


def _anomalies(event: AnomalyFound, layout: Layout) -> list[Rows]:
    names = ("name", "head", "raised", "seen", "threshold", "updates", "message", "advice")
    return [Rows("anomalies", {name: [getattr(event, name)] for name in names})]


def _samples(event: Sampled, layout: Layout) -> list[Rows]:
    names, values = list(event.values), list(event.values.values())
    return [Rows("samples", {"step": [event.step] * len(names), "name": names, "value": values})]


def _notes(event: Noted, layout: Layout) -> list[Rows]:
    return [Rows("notes", {"text": [event.text]})]


def _dropped(event: Dropped, layout: Layout) -> list[Rows]:
    names = ("sink", "what", "count")
    return [Rows("dropped", {name: [getattr(event, name)] for name in names})]


_WRITERS: Mapping[type[Event], Callable[[Any, Layout], list[Rows]]] = {
    AnomalyFound: _anomalies,
    Dropped: _dropped,
    EpisodeEnded: _episodes,
    Evaluated: _evaluations,
    LifecycleChanged: _lifecycle,
    Noted: _notes,
    RolledBack: _rollbacks,
    RunStarted: _runs,
    Sampled: _samples,
    UpdateMetrics: _updates,
}
