"""All that is said and drawn of one run of `grow`, as plain values: no model, no tensors.

Epoch `e` ends with a decision. What a slot holds after it is what trains in epoch `e + 1`, where
pictures show it; the decision stands at the edge between the two.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from esper.leyline import LifecycleOp, SeedStage
from esper.nissa import Cell, DecisionRecord
from esper.show.run_facts import Array, Row, Story, signed


@dataclass(frozen=True, kw_only=True)
class SlotState:
    """A slot that is not dormant, after an epoch."""

    slot: str
    stage: str
    blueprint: str | None = None  # None while it waits after a removal
    alpha: float = 0.0
    params: int = 0
    contribution: float | None = None  # points, as measured in this epoch

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
    op: str
    decision: str = ""  # in words; empty where nothing was changed
    slot: str | None = None  # that the decision names
    changes: Sequence[tuple[str, str, str]] = ()  # slots, the stages they came to, and why
    slots: Sequence[SlotState] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)  # by phase; empty: not recorded
    flops: float | None = None  # of training; None: not counted

    @property
    def news(self) -> list[str]:
        """What was decided, and which stages passed with time."""
        last = {slot: stage for slot, stage, _ in self.changes if slot != self.slot}
        passed = [f"slot {name}: {stage.lower()}" for name, stage in last.items()]
        return [self.decision, *passed] if self.decision else passed


@dataclass(frozen=True, kw_only=True)
class Part:
    """A module of the model, or several alike in a row, as it was written down."""

    path: str
    kind: str
    params: int  # of its own and of what is in it
    depth: int
    opened: bool = False  # are its own parts listed after it?
    slots: tuple[str, ...] = ()  # behind it

    @property
    def label(self) -> str:
        return f"{self.path} {self.kind}".strip()


@dataclass(frozen=True, kw_only=True)
class ShownSeed:
    """A seed from its planting to its end."""

    slot: str
    states: Mapping[int, SlotState]  # after these epochs, in order
    contributions: Mapping[int, float]  # points, in these epochs, until it was pruned
    left: int | None  # the epoch after which it was gone; None: it is there
    ended: bool  # was it gone because the run was over?

    @property
    def last(self) -> SlotState:
        return self.states[max(self.states)]

    @property
    def planted(self) -> int:
        return min(self.states)

    @property
    def name(self) -> str:
        return f"{self.last.blueprint} at {self.slot}"

    @property
    def kept(self) -> int | None:
        """The epoch after which it became permanent."""
        stages = ((epoch, state.stage) for epoch, state in self.states.items())
        return next((epoch for epoch, stage in stages if stage == SeedStage.FOSSILIZED.name), None)

    @property
    def contribution(self) -> float | None:
        """When it was last measured."""
        return [*self.contributions.values()][-1] if self.contributions else None

    @property
    def fate(self) -> str:
        if self.kept is not None:
            return f"permanent after epoch {self.kept}"
        if self.left is None:
            return f"on probation: {self.last.stage.lower()}"
        gone = f"pruned, gone after epoch {self.left}"
        return "not permanent at the end: left out" if self.ended else gone


@dataclass(frozen=True, kw_only=True)
class GrowthFacts:
    """One run, as far as it is."""

    name: str
    settings: Row
    versions: Row = field(default_factory=dict)
    planned: int  # epochs
    metric: str
    before: Mapping[str, float]  # loss and score before training
    after: Mapping[str, float]  # of the exported network; empty until it is finished
    host_params: int
    room: int | None  # parameters that seeds may have; None: no limit
    places: Sequence[str] = ()  # all slots, in order
    parts: Sequence[Part] = ()
    epochs: Sequence[ShownEpoch] = ()

    @property
    def lives(self) -> list[ShownSeed]:
        """Every seed that was ever planted, in order."""
        found = [life for slot in self.places for life in self._lives_at(slot)]
        return sorted(found, key=lambda life: life.planted)

    def _lives_at(self, slot: str) -> Iterator[ShownSeed]:
        held = {e.number: state for e in self.epochs for state in e.slots if state.slot == slot}
        numbers = [epoch.number for epoch in self.epochs]
        for lives, life in groupby(numbers, lambda n: n in held and bool(held[n].blueprint)):
            if not lives:
                continue
            states = {number: held[number] for number in life}
            gone = next((epoch for epoch in self.epochs if epoch.number > max(states)), None)
            yield ShownSeed(
                slot=slot,
                states=states,
                contributions={  # measured of what the epoch before left
                    number: state.contribution
                    for number, state in held.items()
                    if state.contribution is not None
                    and number - 1 in states
                    and states[number - 1].stage != SeedStage.PRUNED.name
                },
                left=None if gone is None else gone.number,
                ended=gone is not None and gone.op not in LifecycleOp.__members__,
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
    def added(self) -> int:
        """Parameters in seeds now."""
        return self.epochs[-1].added if self.epochs else 0

    @property
    def where(self) -> str:
        """Device and precision, as far as they are known."""
        known = (self.settings.get(name) for name in ("device", "precision"))
        return ", ".join(str(each) for each in known if each) or "device not recorded"

    @property
    def flops(self) -> float | None:
        counted = [epoch.flops for epoch in self.epochs if epoch.flops is not None]
        return sum(counted) if counted else None

    def curve(self, name: str) -> Array:
        """[T] numbers over epochs, NaN where one is not known."""
        found = [getattr(epoch, name) for epoch in self.epochs]
        return np.array([math.nan if value is None else value for value in found], dtype=float)

    @property
    def story(self) -> Story:
        """Slots and decisions over epochs, for the timeline."""
        steps = len(self.epochs)
        return Story(
            kind="",
            episode={},
            slots=tuple(self.places),
            cells=[
                Cell(epoch.number, state.slot, state.stage, state.blueprint, state.alpha)
                for epoch in self.epochs[:-1]
                for state in epoch.slots
            ],
            decisions=[
                DecisionRecord(
                    round=0,
                    step=epoch.number,
                    env=0,
                    actions={"op": epoch.op, "slot": epoch.slot or ""},
                    value=math.nan,
                    log_prob=math.nan,
                )
                for epoch in self.epochs
            ],
            accuracy=self.curve("score"),
            committed=self.curve("committed"),
            alpha={name: np.full(steps, math.nan) for name in self.places},
            control=None,
            failure=None,
        )
