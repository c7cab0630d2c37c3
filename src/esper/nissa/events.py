"""Events: what happened, typed and versioned, one record for all environments of a step.

An event copies what it keeps when it is made, and keeps little, so that whoever makes it may go on
with its arrays. They are arrays on the CPU: tensors, numpy or lists. What was not measured is NaN.

Shapes: `N` environments, `W` watched environments (the first ones), `H` heads, `A` actions of the
largest head, `F` features, `M` rows of an event.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from esper.leyline.errors import AgreementError

Array = Any  # given as a tensor on the CPU, an array or a list; kept as a numpy array

DEFAULT_WATCHED = 16  # environments whose observations, probabilities and masks are kept
SUMMARY = "all"  # the context of an evaluation's figure over all contexts

_COLUMN = re.compile(r"(?!(round|step|env|reward)$|reward_)[a-z_][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a round of training."""

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    droppable: ClassVar[bool] = False  # may be lost, and is counted, where a sink is too slow

    round: int


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A run began, or was resumed after `round`."""

    kind = "run"

    config: Mapping[str, Any]  # whatever JSON can hold
    versions: Mapping[str, str] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)  # fingerprints by name


@dataclass(frozen=True, kw_only=True)
class Decisions(Event):
    """What was decided for every environment, and of the watched ones why."""

    kind = "decision"

    step: int
    actions: Array  # [N, H] in the layout's order of heads
    values: Array  # [N]
    log_probs: Array  # [N, H] of the actions taken
    observations: Array | None = None  # [N or W, F]
    masks: Array | None = None  # [N or W, H, A] bool: what was legal
    probabilities: Array | None = None  # [N or W, H, A]
    active: Array | None = None  # [N] bool; the others idled and decided nothing
    first_env: int = 0  # the number of the first row
    watched: InitVar[int] = DEFAULT_WATCHED

    def __post_init__(self, watched: int) -> None:
        _own(self, "actions", np.int32, 2)
        rows = self.actions.shape[0]
        _own(self, "values", np.float32, 1, rows)
        _own(self, "log_probs", np.float32, 2, rows)
        _own(self, "active", np.bool_, 1, rows)
        for name, dtype, axes in (
            ("observations", np.float32, 2),
            ("masks", np.bool_, 3),
            ("probabilities", np.float32, 3),
        ):
            if getattr(self, name) is not None:
                _set(self, name, getattr(self, name)[:watched])
            _own(self, name, dtype, axes)


@dataclass(frozen=True, kw_only=True)
class Stepped(Event):
    """What came of a decision in every environment: its reward, term by term, and measurements."""

    kind = "step"

    step: int
    rewards: Array  # [N]
    terms: Mapping[str, Array] = field(default_factory=dict)  # [N] each; they sum to the reward
    measures: Mapping[str, Array] = field(default_factory=dict)  # [N] each
    active: Array | None = None  # [N] bool
    first_env: int = 0

    def __post_init__(self) -> None:
        _own(self, "rewards", np.float64, 1)
        rows = self.rewards.shape[0]
        _own(self, "active", np.bool_, 1, rows)
        for part in ("terms", "measures"):
            given = getattr(self, part)
            owned = {
                _column(name): _owned(f"{part}[{name!r}]", value, np.float64, 1, rows)
                for name, value in given.items()
            }
            _set(self, part, owned)


@dataclass(frozen=True, kw_only=True)
class LifecycleChanged(Event):
    """Slots that changed their stage during a step, in the order in which they did."""

    kind = "lifecycle"

    step: int
    env: Array  # [M]
    slot: Array  # [M]
    before: Array  # [M] SeedStage
    after: Array  # [M] SeedStage
    cause: Array  # [M] LifecycleOp (from 0) or Cause (below 0)
    blueprint: Array | None = None  # [M] index in the catalogue; below 0: nothing
    reason: Sequence[str] | None = None  # [M] why a gate let it pass, or the governor did not

    def __post_init__(self) -> None:
        _own(self, "env", np.int32, 1)
        for name in ("slot", "before", "after", "cause", "blueprint"):
            _own(self, name, np.int32, 1, len(self.env))
        _own_texts(self, "reason", len(self.env))


@dataclass(frozen=True, kw_only=True)
class EpisodeEnded(Event):
    """Episodes that ended with a step. Scores are percent, gains points."""

    kind = "episode"

    step: int
    env: Array  # [M]
    context: Sequence[str]  # [M]
    seed: Array  # [M] of the case
    validation: Array  # [M] the committed network, mean of the last epochs
    control: Array  # [M] the same case, never grown
    net_gain: Array  # [M] over the control, less the rent
    returns: Array  # [M] sum of the rewards
    added: Array  # [M] parameters
    exposure: Array  # [M] share of the host's parameters × share of the episode
    interventions: Array  # [M]
    rolled_back: Array  # [M] bool
    test: Array | None = None  # [M]

    def __post_init__(self) -> None:
        _own(self, "env", np.int32, 1)
        rows = len(self.env)
        _own_texts(self, "context", rows)
        for name in ("validation", "control", "net_gain", "returns", "exposure", "test"):
            _own(self, name, np.float64, 1, rows)
        for name in ("seed", "added", "interventions", "rolled_back"):
            _own(self, name, np.int64, 1, rows)


@dataclass(frozen=True, kw_only=True)
class RolledBack(Event):
    """Environments that failed and were put back to their last good state."""

    kind = "rollback"

    step: int
    env: Array  # [M]
    reason: Sequence[str]  # [M]

    def __post_init__(self) -> None:
        _own(self, "env", np.int32, 1)
        _own_texts(self, "reason", len(self.env))


@dataclass(frozen=True, kw_only=True)
class UpdateMetrics(Event):
    """What an update of the learner reports, flat: `flatten(agent.update())`."""

    kind = "update"

    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        _own_numbers(self, "metrics")


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """Scores of one controller on fixed contexts; the context "all" is the figure over them."""

    kind = "evaluation"

    controller: str
    context: Sequence[str]  # [M]
    score: Array  # [M]
    low: Array | None = None  # [M] of a 95 % interval
    high: Array | None = None  # [M]
    episodes: Array | None = None  # [M]

    def __post_init__(self) -> None:
        _own(self, "score", np.float64, 1)
        rows = len(self.score)
        _own_texts(self, "context", rows)
        for name in ("low", "high"):
            _own(self, name, np.float64, 1, rows)
        _own(self, "episodes", np.int64, 1, rows)


@dataclass(frozen=True, kw_only=True)
class AnomalyFound(Event):
    """Something is wrong with the learning, or no longer is."""

    kind = "anomaly"

    name: str
    head: str  # "" where it is about all heads
    raised: bool  # False: it is over
    seen: float
    threshold: float
    updates: int  # in a row that showed it
    message: str  # what was seen, and the threshold
    advice: str  # what a person can do

    def __str__(self) -> str:
        return f"{self.message} {self.advice}".strip()


@dataclass(frozen=True, kw_only=True)
class Sampled(Event):
    """Numbers that are nice to have: times of phases, counts of stages."""

    kind = "sample"
    droppable = True

    values: Mapping[str, float]
    step: int | None = None

    def __post_init__(self) -> None:
        _own_numbers(self, "values")


@dataclass(frozen=True, kw_only=True)
class Noted(Event):
    """A sentence for people, as when a sink failed."""

    kind = "note"

    text: str


@dataclass(frozen=True, kw_only=True)
class Dropped(Event):
    """How many events of a kind a sink was too slow for."""

    kind = "dropped"

    sink: str
    what: str  # the kind that was dropped
    count: int


def _owned(
    name: str, value: Array, dtype: DTypeLike, axes: int, rows: int | None = None
) -> NDArray[Any]:
    """A copy of an array, refused if it is not where or what it should be."""
    if hasattr(value, "detach"):
        if not value.is_cpu:
            raise AgreementError(
                f"Events take what is on the CPU, and {name!r} is elsewhere",
                given=str(value.device),
                fix="fetch a step's tensors together, once",
            )
        try:
            value = value.detach().numpy()
        except TypeError:  # numpy has no bfloat16
            value = value.detach().float().numpy()
    array = np.array(value, dtype=dtype)
    if array.ndim != axes or (rows is not None and len(array) != rows):
        raise AgreementError(
            f"{name!r} of an event has the wrong shape",
            given=list(array.shape),
            valid=f"{axes} axes" + ("" if rows is None else f", {rows} rows"),
        )
    return array


def _own(event: Event, name: str, dtype: DTypeLike, axes: int, rows: int | None = None) -> None:
    value = getattr(event, name)
    if value is not None:
        _set(event, name, _owned(name, value, dtype, axes, rows))


def _own_texts(event: Event, name: str, rows: int) -> None:
    value = getattr(event, name)
    if value is None:
        return
    texts = tuple(str(text) for text in value)
    if isinstance(value, str) or len(texts) != rows:
        raise AgreementError(
            f"{name!r} of an event needs one text for each row", given=len(texts), valid=rows
        )
    _set(event, name, texts)


def _own_numbers(event: Event, name: str) -> None:
    _set(event, name, {key: float(value) for key, value in getattr(event, name).items()})


def _column(name: str) -> str:
    if not _COLUMN.fullmatch(name):
        raise AgreementError(
            "A measurement's name becomes a column",
            given=repr(name),
            valid="small letters, digits and underscores; round, step, env and reward are taken",
        )
    return name


def _set(event: Event, name: str, value: object) -> None:
    object.__setattr__(event, name, value)
