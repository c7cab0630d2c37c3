"""All that is said and drawn of one run of `grow`, as plain values: no model, no tensors.

Epoch `e` ends with a decision. What a slot holds after it is what trains in epoch `e + 1`, where
pictures show it; the decision stands at the edge between the two.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import numpy as np

from esper.leyline import LifecycleOp, SeedStage
from esper.nissa import Cell
from esper.show.report import Pictured
from esper.show.run_facts import Array, Row, Story, signed
from esper.show.terminal import one_line_repr


@dataclass(frozen=True, kw_only=True)
class SlotState:
    """A slot that is not dormant, after an epoch."""

    slot: str
    stage: str
    blueprint: str | None = None  # None while it waits after a removal
    alpha: float = 0.0
    params: int = 0
    contribution: float | None = None  # points, as measured in this epoch

    def __repr__(self) -> str:
        return one_line_repr(self, str(self))

    def __str__(self) -> str:
        worth = "" if self.contribution is None else f", {signed(self.contribution)} points"
        held = f"{self.blueprint} at {self.slot}: {self.stage.lower()}"
        return f"{held}, alpha {self.alpha:.2f}{worth}"


@dataclass(frozen=True, kw_only=True)
class ShownEpoch:
    """One epoch and the decision that ended it."""

    number: int  # from 1
    train_loss: float
    val_loss: float
    score: float  # percent
    committed: float | None  # with permanent seeds only; None: not measured
    added: int  # parameters in seeds, after the decision
    most_added: int  # before or after it
    op: str
    decision: str = ""  # in words; empty where nothing was changed
    slot: str | None = None  # that the decision names
    changes: Sequence[tuple[str, str, str]] = ()  # slots, the stages they came to, and why
    slots: Sequence[SlotState] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)  # by phase; empty: not recorded
    flops: float | None = None  # of training; None: not counted
    tried: str = ""  # what a tryout came to, in words

    def __repr__(self) -> str:
        score = f"score {self.score:.2f}, validation loss {self.val_loss:.4g}"
        text = f"{self.number}: {score}, {self.added:,} parameters in seeds, {self.op}"
        return one_line_repr(self, text)

    @property
    def told(self) -> list[str]:
        """What was tried out and decided."""
        return [each for each in (self.tried, self.decision) if each]

    @property
    def news(self) -> list[str]:
        """What was tried out and decided, and which stages passed with time."""
        last = {slot: stage for slot, stage, _ in self.changes if slot != self.slot}
        passed = [f"slot {name}: {stage.lower()}" for name, stage in last.items()]
        return self.told + passed


@dataclass(frozen=True, kw_only=True)
class Part:
    """A module of the model, or several alike in a row, as it was written down."""

    path: str
    kind: str
    params: int  # of its own and of what is in it
    depth: int
    opened: bool = False  # are its own parts listed after it?
    slots: tuple[str, ...] = ()  # behind it

    def __repr__(self) -> str:
        return one_line_repr(self, f"{self.label}: {self.params:,} parameters")

    @property
    def label(self) -> str:
        return f"{self.path} {self.kind}".strip()


GROWING, PERMANENT, PRUNED = "growing", "permanent", "pruned"
SWITCHED_OFF = "switched off at the end"  # since it was not permanent


@dataclass(frozen=True, kw_only=True)
class SeedLife:
    """A seed from its planting to its end, and what became of it."""

    slot: str
    blueprint: str
    params: int  # the most that it had
    planted: int  # the epoch after which it was
    stage: str  # the last one
    fate: str  # growing, permanent, pruned, or switched off at the end
    ended: int | None  # the epoch after which its fate was decided
    there: bool  # is it still?
    contributions: Mapping[int, float]  # points, in these epochs, until it was pruned

    @property
    def name(self) -> str:
        return f"{self.blueprint} at {self.slot}"

    @property
    def contribution(self) -> float | None:
        """In percent points, when it was last measured."""
        return [*self.contributions.values()][-1] if self.contributions else None

    @property
    def worth(self) -> str:
        return "—" if self.contribution is None else signed(self.contribution)

    @property
    def course(self) -> str:
        if self.ended is None:
            return f"on probation: {self.stage.lower()}"
        return f"{self.fate} after epoch {self.ended}"

    @property
    def missed(self) -> str:
        """The contribution in words that nobody takes for what growing won."""
        if self.contribution is None:
            return ""
        size, last = abs(self.contribution), self.fate == PERMANENT
        if self.contribution < 0.0:
            return f", {'stands' if last else 'stood'} in the way by {size:.2f} points"
        if not last:
            return f", was missed by {size:.2f} points when it was last left out"
        return f", is missed by {size:.2f} points if it is left out"

    def __repr__(self) -> str:
        return one_line_repr(self, f"{self.name}: +{self.params:,} parameters, {self.course}")

    def __str__(self) -> str:
        planted = f"{self.params:,} parameters, planted after epoch {self.planted}"
        return f"{self.name}: {planted}, {self.course}{self.missed}"


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """The part of a finished network's validation score that is lost without one permanent seed.

    In percentage points of accuracy or of a user-defined metric; in units of the loss where the
    loss is the metric.
    """

    value: float
    # Over validation samples, of paired differences; None: the score of a sample is not known.
    standard_error: float | None

    @property
    def is_measurable(self) -> bool:
        """Is it at least two standard errors away from zero?"""
        if self.value == 0.0:
            return False
        return self.standard_error is None or abs(self.value) >= 2.0 * self.standard_error


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """Seeds that were planted and trained on trial, and the loss that they reached."""

    seeds: tuple[str, ...]  # as "blueprint at slot"
    val_loss: float  # infinite: training diverged
    val_loss_without: float  # of the model at the same epoch
    is_chosen: bool

    def __repr__(self) -> str:
        losses = f"validation loss {self.val_loss:.4g}, {self.val_loss_without:.4g} without"
        decision = "chosen" if self.is_chosen else "not chosen"
        return one_line_repr(self, f"{decision}, {losses}: {', '.join(self.seeds)}")


@dataclass(frozen=True, kw_only=True)
class Report(Pictured):
    """One run, as far as it is: what grew, when, and what it was worth; prints as text."""

    page_of = "growth_page"

    name: str
    model: str  # name of its class
    settings: Row
    versions: Row = field(default_factory=dict)
    origin: Row = field(default_factory=dict)  # of model and data, for the command line
    planned: int  # epochs
    metric: str
    before: Mapping[str, float]  # loss and score before training
    after: Mapping[str, float]  # of the exported network; empty until it is finished
    contributions: Mapping[str, Contribution] = field(default_factory=dict)  # to it, by slot
    trials: Sequence[TrialResult] = ()
    host_params: int
    room: int | None  # parameters that seeds may have; None: no limit
    places: Sequence[str] = ()  # all slots, in order
    parts: Sequence[Part] = ()
    epochs: Sequence[ShownEpoch] = ()

    @cached_property
    def seeds(self) -> tuple[SeedLife, ...]:
        """Every one that ever lived, in the order in which they were planted."""
        found = [life for slot in self.places for life in self._lives_at(slot)]
        return tuple(sorted(found, key=lambda life: life.planted))

    @property
    def grown(self) -> tuple[SeedLife, ...]:
        """Those that became part of the network."""
        return tuple(seed for seed in self.seeds if seed.fate == PERMANENT)

    def _lives_at(self, slot: str) -> Iterator[SeedLife]:
        held = {e.number: state for e in self.epochs for state in e.slots if state.slot == slot}
        numbers = [epoch.number for epoch in self.epochs]
        for lives, life in groupby(numbers, lambda n: n in held and bool(held[n].blueprint)):
            if not lives:
                continue
            states = {number: held[number] for number in life}
            later = next((epoch for epoch in self.epochs if epoch.number > max(states)), None)
            over = later is not None and later.op not in LifecycleOp.__members__
            firsts = {state.stage: n for n, state in reversed(states.items())}
            kept, pruned = (firsts.get(s.name) for s in (SeedStage.FOSSILIZED, SeedStage.PRUNED))
            fate = GROWING if later is None else SWITCHED_OFF if over else PRUNED
            fate = PERMANENT if kept else PRUNED if pruned else fate
            yield SeedLife(
                slot=slot,
                blueprint=str(held[max(states)].blueprint),
                params=max(state.params for state in states.values()),
                planted=min(states),
                stage=held[max(states)].stage,
                fate=fate,
                ended=kept or pruned or (later.number if later else None),
                there=later is None,
                contributions={  # measured of what the epoch before left
                    number: state.contribution
                    for number, state in held.items()
                    if state.contribution is not None
                    and number - 1 in states
                    and states[number - 1].stage != SeedStage.PRUNED.name
                },
            )

    @property
    def seconds(self) -> dict[str, float]:
        """By phase, over all epochs."""
        phases = dict.fromkeys(phase for epoch in self.epochs for phase in epoch.seconds)
        return {
            phase: sum(epoch.seconds.get(phase, 0.0) for epoch in self.epochs) for phase in phases
        }

    @property
    def score_name(self) -> str:
        """A loss is turned into a score, which is another number than the loss."""
        return "score" if self.metric == "loss" else self.metric

    @property
    def latest_score(self) -> float | None:
        """Of the exported network, or after the last epoch so far."""
        return self.after.get("score", self.epochs[-1].score if self.epochs else None)

    @property
    def latest(self) -> Mapping[str, float]:
        """Loss and score of the exported network, or after the last epoch so far."""
        if self.after or not self.epochs:
            return self.after
        return {"loss": self.epochs[-1].val_loss, "score": self.epochs[-1].score}

    @property
    def headline(self) -> str:
        """Parameters before and after, and the score, in a few words."""
        before = self.host_params
        sizes = f"{self.model}: {before:,} → {before + self.added:,} parameters"
        if not self.latest:
            return f"{sizes}, not trained"
        score = f"{self.score_name} {self.latest['score']:.1f}"
        if self.metric == "accuracy":
            score = f"{score} %"
        if self.metric == "loss":
            score = f"loss {self.latest['loss']:.3g}"
        if len(self.epochs) < self.planned:
            return f"{sizes}, {score}, {len(self.epochs)} of {self.planned} epochs"
        return f"{sizes}, {score}"

    @property
    def added(self) -> int:
        """Parameters in seeds now."""
        return self.epochs[-1].added if self.epochs else 0

    @property
    def share(self) -> float:
        """The same in percent of the model."""
        return 100.0 * self.added / max(self.host_params, 1)

    @property
    def most_added(self) -> int:
        """Parameters in seeds at any time, those on probation included."""
        return max((epoch.most_added for epoch in self.epochs), default=0)

    @property
    def within_budget(self) -> bool:
        return self.room is None or self.most_added <= self.room

    @property
    def limit(self) -> str:
        return "no limit" if self.room is None else f"allowed {self.room:,}"

    @property
    def controller(self) -> str:
        return str(self.settings["controller"])

    @property
    def flops(self) -> float | None:
        counted = [epoch.flops for epoch in self.epochs if epoch.flops is not None]
        return sum(counted) if counted else None

    @property
    def relative_cost(self) -> float | None:
        """Training FLOPs of this run over those of plain training for the same epochs.

        The run's FLOPs include seeds, shadows, rewound trials and an epoch that failed and was
        repeated. Validation passes of the model count on neither side, and passes in which shadows
        are measured count as the run's. Plain training costs the first epoch, before the end of
        which nothing is planted, times the number of epochs.

        Returns:
            1.0 for a run that only trained its model; None where FLOPs could not be counted.
        """
        flops = [epoch.flops for epoch in self.epochs]
        if not flops or None in flops or not flops[0]:
            return None
        return sum(count for count in flops if count is not None) / (flops[0] * len(flops))

    def curve(self, name: str) -> Array:
        """[T] numbers over epochs, NaN where one is not known."""
        found = [getattr(epoch, name) for epoch in self.epochs]
        return np.array([math.nan if value is None else value for value in found], dtype=float)

    @property
    def story(self) -> Story:
        """Slots and decisions over epochs, for the timeline."""
        return Story(
            slots=tuple(self.places),
            cells=[
                Cell(epoch.number, state.slot, state.stage, state.blueprint, state.alpha)
                for epoch in self.epochs[:-1]
                for state in epoch.slots
            ],
            marks=[(epoch.number, epoch.op, epoch.slot or "") for epoch in self.epochs],
            accuracy=self.curve("score"),
            committed=self.curve("committed"),
        )

    def __repr__(self) -> str:
        return one_line_repr(self, self.headline)

    def __str__(self) -> str:
        known, after = self.settings, self.after
        where = f", on {known['device']} in {known['precision']} precision"
        lines = [
            f"{len(self.epochs)} of {self.planned} epochs under {self.controller!r}"
            + (where if known["device"] else ""),
            f"parameters: {self.host_params:,} + {self.added:,} ({self.share:+.1f} %), at most "
            f"{self.most_added:,} in seeds at any time, {self.limit}: "
            + ("within the budget" if self.within_budget else "OVER THE BUDGET"),
            f"{self.score_name}: {_shown(self.before)} before training"
            + (f", {_shown(after)} of the exported network" if after else ""),
        ]
        if known["score"] and self.metric != "accuracy":
            lines.append(f"a score is {known['score']}")
        if "test_score" in after:
            lines.append(f"test: {_shown(after, 'test_')}")
        lines += ["", "grown:" if self.grown else "nothing grew for good"]
        lines += [f"  {seed}" for seed in self.grown]
        if others := [f"  {seed}" for seed in self.seeds if seed.fate != PERMANENT]:
            lines += ["", "planted, and not permanent:", *others]
        told = [(epoch.number, each) for epoch in self.epochs for each in epoch.told]
        if told:
            lines += ["", "decisions:"]
            lines += [f"  after epoch {number}: {each}" for number, each in told]
        return "\n".join(lines)


def _shown(scores: Mapping[str, float], of: str = "") -> str:
    return f"{scores[f'{of}score']:.2f} (loss {scores[f'{of}loss']:.4g})"
