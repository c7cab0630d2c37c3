"""Events: what happened, typed and versioned, one record for all environments of a step.

An event copies what it keeps when it is made, and keeps little, so that whoever makes it may go on
with its arrays. They are arrays on the CPU: tensors, numpy or lists. What was not measured is NaN.

The annotations of an event are its table too: a new event is a new class here, and a sentence in
docs/telemetry.md.

Shapes: `N` environments, `W` watched environments (the first ones), `H` heads, `A` actions of the
largest head, `F` features, `M` rows of an event.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from numbers import Real
from typing import Annotated, Any, ClassVar, dataclass_transform

from esper.nissa import schema
from esper.nissa.schema import Array, Field, Measures, Numeric, RunLayout

KINDS: "dict[str, type[Event]]" = {}
"""Every kind of event, by its name."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a round of training. Whatever is derived is a frozen dataclass."""

    kind: ClassVar[str]
    table: ClassVar[str]  # of a run's file
    key: ClassVar[tuple[str, ...]] = ("round", "event", "n")  # of that table
    version: ClassVar[int] = 1
    droppable: ClassVar[bool]  # may be lost, and is counted, where a sink is too slow
    repeatable: ClassVar[bool]  # the same, to the bit, if a run is interrupted and resumed
    declared: ClassVar[Mapping[str, Field]] = {}  # what the annotations say, but for the round
    _kept: ClassVar[Sequence[tuple[str, Field]]] = ()  # what of it is copied, required arrays first

    round: int

    def __init_subclass__(
        cls, kind: str = "", table: str = "", droppable: bool = False, repeatable: bool = True
    ) -> None:
        cls.kind, cls.table, cls.droppable, cls.repeatable = kind, table, droppable, repeatable
        cls.declared = {**cls.declared, **schema.fields_of(cls)}
        copied = [item for item in cls.declared.items() if type(item[1]).kept is not Field.kept]
        cls._kept = sorted(
            copied, key=lambda item: hasattr(cls, item[0]) or isinstance(item[1], schema.Text)
        )
        dataclass(frozen=True, kw_only=True)(cls)
        if kind:
            KINDS[kind] = cls

    def __post_init__(self) -> None:
        """Copy what was given; the first array says how many rows there are."""
        rows: int | None = None
        for name, kind in self._kept:
            value = getattr(self, name)
            if value is not None:
                value = kind.kept(name, value, rows)
                object.__setattr__(self, name, value)
                if rows is None and isinstance(kind, Numeric):
                    rows = len(value)


class StepEvent(Event):
    """About every environment of a step: its table has a row for each of those that were active."""

    key = ("round", "step", "env")
    step: int
    active: Annotated[Array, Numeric("?", column=None)] | None = None  # [N] the others idled
    first_env: Annotated[int, Field()] = 0  # the number of the first row


class RunStarted(Event, kind="run", table="runs", repeatable=False):
    """A run began, or was resumed after `round`."""

    config: schema.JsonMapping
    versions: schema.JsonMapping = field(default_factory=dict)
    seeds: schema.JsonMapping = field(default_factory=dict)
    data: schema.JsonMapping = field(default_factory=dict)  # fingerprints by name
    layout: Annotated[RunLayout | None, Field()] = None  # for sinks that need names


class RunEnded(Event, kind="end", table="ends", repeatable=False):
    """A run has come to its end, or will not go on by itself. One that was killed says nothing."""

    state: str  # finished, stopped by a person, or failed
    text: str = ""  # why


class Decisions(StepEvent, kind="decision", table="decisions"):
    """What was decided for every environment, and of the watched ones why."""

    actions: Annotated[Array, Numeric("<i4", 2)]  # [N, H] in the layout's order of heads
    values: Annotated[Array, Numeric("<f4", column="value")]  # [N]
    log_probs: Annotated[  # [N, H] of the actions taken
        Array, Numeric("<f4", 2, column="log_prob", blob=schema.LOG_PROBS)
    ]
    observations: schema.Observations | None = None  # [N or W, F]
    masks: schema.Masks | None = None  # [N or W, H, A] bool: what was legal
    probabilities: schema.Probabilities | None = None  # [N or W, H, A]


class Refused(Event, kind="refusal", table="refusals"):
    """What gates kept watched environments from, where a slot was in the right stage for it."""

    step: int
    env: schema.Integers  # [M]
    slot: schema.Slots  # [M]
    op: schema.Causes  # [M] LifecycleOp
    reason: schema.Texts  # [M]


class Stepped(StepEvent, kind="step", table="steps"):
    """What came of a decision in every environment: its reward, term by term, and measurements."""

    rewards: Annotated[Array, Numeric("<f8", column="reward")]  # [N]
    terms: Annotated[Mapping[str, Array], Measures("reward_")] = field(  # [N] each, sum: the reward
        default_factory=dict
    )
    measures: Annotated[Mapping[str, Array], Measures()] = field(default_factory=dict)  # [N] each


class LifecycleChanged(Event, kind="lifecycle", table="lifecycle"):
    """Slots that changed their stage during a step, in the order in which they did."""

    step: int
    env: schema.Integers  # [M]
    slot: schema.Slots  # [M]
    before: schema.Stages  # [M] SeedStage
    after: schema.Stages  # [M] SeedStage
    cause: schema.Causes  # [M] LifecycleOp (from 0) or Cause (below 0)
    blueprint: schema.Blueprints | None = None  # [M] index in the catalogue; below 0: nothing
    reason: schema.Texts | None = None  # [M] why a gate let it pass, or the governor did not


class EpisodeEnded(Event, kind="episode", table="episodes"):
    """Episodes that ended with a step. Scores are percent, gains points."""

    step: int
    env: schema.Integers  # [M]
    context: schema.Texts  # [M]
    seed: schema.Integers  # [M] of the case
    test: schema.Reals | None = None  # [M]
    validation: schema.Reals  # [M] the committed network, mean of the last epochs
    control: schema.Reals  # [M] the same case, never grown
    net_gain: schema.Reals  # [M] over the control, less the rent
    returns: schema.Reals  # [M] sum of the rewards
    added: schema.Integers  # [M] parameters
    exposure: schema.Reals  # [M] share of the host's parameters × share of the episode
    interventions: schema.Integers  # [M]
    rolled_back: schema.Integers  # [M] bool


class RolledBack(Event, kind="rollback", table="rollbacks"):
    """Environments that failed and were put back to their last good state."""

    step: int
    env: schema.Integers  # [M]
    reason: schema.Texts  # [M]


class UpdateMetrics(Event, kind="update", table="updates"):
    """What an update of the learner reports, flat: `flatten(agent.update())`."""

    metrics: schema.NamedNumbers


class Evaluated(Event, kind="evaluation", table="evaluations"):
    """Scores of one controller on fixed contexts; the context "all" is the figure over them."""

    controller: str
    context: schema.Texts  # [M]
    score: schema.Reals  # [M]
    low: schema.Reals | None = None  # [M] of a 95 % interval
    high: schema.Reals | None = None  # [M]
    episodes: schema.Integers | None = None  # [M]


class Attributed(Event, kind="attribution", table="attributions"):
    """What each seed of an evaluation's best episode is worth, in points of validation accuracy."""

    controller: str
    context: str
    seed: int  # of the case
    score: float  # of the episode
    slot: schema.Slots  # [M]
    blueprint: schema.Blueprints  # [M]
    shapley: schema.Reals  # [M] sum: the network with all its seeds less the one with none
    left_out: schema.Reals  # [M] the network with all its seeds less the one without this


class EpochEnded(Event, kind="epoch", table="epochs"):
    """An epoch of a network that grows; 0 is the network before training. Scores are percent."""

    train_loss: float | None = None
    val_loss: float
    score: float  # on validation data, with everything that has grown
    committed: float | None = None  # with permanent seeds alone
    added: int = 0  # parameters in seeds, after the decision
    most_added: int = 0  # before or after it


class Contributed(Event, kind="contribution", table="contributions"):
    """What every seed that a growing network shows is worth: its score less that without it."""

    slot: schema.Texts  # [M]
    blueprint: schema.Texts  # [M]
    contribution: schema.Reals  # [M] points


class Auditioned(Event, kind="audition", table="auditions"):
    """What every seed that learns beside a growing network has shown, unplanted."""

    slot: schema.Texts  # [M]
    blueprint: schema.Texts  # [M]
    epochs: schema.Reals  # [M] that it has learned for
    gain: schema.Reals  # [M] validation loss without it less with it
    error: schema.Reals  # [M] standard error of the gain


class CasesPlayed(Event, kind="result", table="results"):
    """Episodes of an evaluation, each of one controller on one case. Gains are points."""

    controller: schema.Texts  # [M]
    context: schema.Texts  # [M]
    seed: schema.Integers  # [M] of the case
    score: schema.Reals  # [M] net gain in units of what can be gained there
    net_gain: schema.Reals  # [M]
    added: schema.Integers  # [M] parameters
    interventions: schema.Integers  # [M]


class GrowthEnded(Event, kind="outcome", table="outcomes"):
    """A network has grown to its end: what is exported, on validation and on test data."""

    loss: float
    score: float
    test_loss: float | None = None
    test_score: float | None = None
    added: int  # parameters


class AnomalyFound(Event, kind="anomaly", table="anomalies"):
    """Something is wrong with the learning, or no longer is."""

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


class Sampled(Event, kind="sample", table="samples", repeatable=False, droppable=True):
    """Numbers that are nice to have: times of phases, counts of stages."""

    step: int | None = None
    values: schema.NamedNumbers


class Noted(Event, kind="note", table="notes", repeatable=False):
    """A sentence for people, as when a sink failed."""

    text: str


class Dropped(Event, kind="dropped", table="dropped", repeatable=False):
    """How many events of a kind a sink was too slow for."""

    sink: str
    what: str  # the kind that was dropped
    count: int


def flatten(metrics: Any, path: str = "") -> dict[str, float]:
    """`{"heads": {"op": {"kl": 0.1}}}` as `{"heads.op.kl": 0.1}`; what is no number is left out.

    Mappings and dataclasses may be nested; numbers, truth values and tensors of one number count.
    """
    if is_dataclass(metrics) and not isinstance(metrics, type):
        metrics = {each.name: getattr(metrics, each.name) for each in fields(metrics)}
    if isinstance(metrics, Mapping):
        found: dict[str, float] = {}
        for name, inner in metrics.items():
            found |= flatten(inner, f"{path}.{name}" if path else str(name))
        return found
    if isinstance(metrics, Real) or getattr(metrics, "shape", None) == ():
        return {path: float(metrics)}
    return {}
