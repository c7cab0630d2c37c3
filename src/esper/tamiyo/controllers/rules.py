"""Rules, from knowing nothing to the default one.

Never grow, and any legal action; rules that plant the next of a list when something happens and
keep what they planted; and the heuristic, which tries seeds and keeps those that pay their rent.

Shapes: `N` environments, `S` slots, `W` epochs remembered, `C` places, `H` heads, `A` actions of a
head.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from esper.leyline import Actions, Blend, BlueprintCatalogue, EsperError, Legality, LifecycleOp
from esper.leyline.constants import DEFAULT_MIN_TRAINING_EPOCHS, DEFAULT_RENT
from esper.leyline.settings import Count, Range, Share, Whole
from esper.leyline.signals import SIGNAL_WINDOW, Signals
from esper.leyline.stages import LIVING_STAGES, SeedStage
from esper.tamiyo.controllers.proposals import (
    draw,
    epochs_to_permanence,
    first_legal,
    first_plant,
    in_time,
    judged,
    open_plants,
    tended,
    youngest,
)
from esper.tamiyo.controllers.protocol import restarted
from esper.tamiyo.controllers.specs import EVERYWHERE, OwnSettings, RuleSettings, find_places


@dataclass(frozen=True, kw_only=True)
class NeverGrow(OwnSettings):
    """Waits: the small host as it is."""

    kind: ClassVar[str] = "never"

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        return Actions.of(legality.space, legality.hosts, op=LifecycleOp.WAIT)


@dataclass(frozen=True, kw_only=True)
class RandomLegal(OwnSettings):
    """Any legal action: first the op, then each other head among what is open to it."""

    kind: ClassVar[str] = "random"
    rate: Share | None = None  # chance of not waiting; None: every legal op is equally likely

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        space = legality.space
        values = Actions.of(space, legality.hosts).values
        for head, name in enumerate(space.names):
            weights = legality.mask(name, values)  # [N, A]
            if head == 0 and self.rate is not None:
                waits = torch.arange(weights.shape[1]) == LifecycleOp.WAIT
                doing = (weights & ~waits).double()
                choices = doing.sum(1, keepdim=True)
                weights = doing * self.rate / choices.clamp(min=1.0)
                weights[:, LifecycleOp.WAIT] = torch.where(choices[:, 0] > 0, 1.0 - self.rate, 1.0)
            values[:, head] = draw(weights, signals.draws[:, head])
        return Actions(space, values)


def plateaued(accuracy: Tensor, patience: int, delta: float) -> Tensor:
    """[N] bool: in its last `patience` epochs, was accuracy [N, W] never `delta` better than
    before them? False until enough is measured; with no patience always true."""
    if patience == 0:
        return torch.ones(len(accuracy), dtype=torch.bool)
    seen = accuracy.nan_to_num(-math.inf)
    recent, before = seen[:, -patience:].amax(1), seen[:, :-patience].amax(1)
    return (before > -math.inf) & (seen[:, -1] > -math.inf) & (recent - before < delta)


def relative_losses(signals: Signals) -> tuple[Tensor, Tensor]:
    """Training loss and generalisation gap of the last epoch, in units of guessing, [N] each."""
    guessing = math.log(max(signals.classes, 2))
    train, validation = signals.latest("train_loss"), signals.latest("validation_loss")
    return train / guessing, (validation - train) / guessing


_REMEMBERED = Range(0, SIGNAL_WINDOW - 1, whole=True)  # epochs of accuracy that signals hold
Patience = Annotated[int, _REMEMBERED]


@dataclass(frozen=True, kw_only=True)
class _Trigger(OwnSettings):
    """When `_ready`, plants the first of its places that is open, and brings it on."""

    places: tuple[str, ...] = EVERYWHERE  # slot/blueprint in order; * for any
    blend: Blend = Blend.IMMEDIATE
    train: Count = DEFAULT_MIN_TRAINING_EPOCHS  # epochs in isolation, unless immediate
    first: Whole = 3  # no planting before this epoch
    seeds: Count | None = None  # at most so many in an episode; None: one in every slot

    def require_possible(self, catalogue: BlueprintCatalogue, horizon: int) -> None:
        find_places(self.places, catalogue)
        require_first_in_time(self.kind, self.first, epochs_to_permanence(self.blend, self.train),
                              horizon)  # fmt: skip

    @abstractmethod
    def _ready(self, signals: Signals) -> Tensor:
        """[N] bool: is it time for the next seed?"""

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        life = signals.lifecycle
        places = find_places(self.places, signals.catalogue)
        when = self._ready(signals) & (life.epoch >= self.first)
        when &= in_time(signals, epochs_to_permanence(self.blend, self.train))
        if self.seeds is not None:
            when &= life.occupied.sum(1) < self.seeds
        wanted = open_plants(legality, self.blend)[:, places[:, 0], places[:, 1]]  # [N, C]
        plant = first_plant(when, wanted, places, self.blend)
        return first_legal(legality, [*tended(signals, legality, self.train), plant])


def require_first_in_time(
    kind: str, first: int, needed: int, horizon: int, earliest: int = 0
) -> None:
    latest = horizon - 1 - needed
    if first > latest:
        fix, valid = f"train for at least {first + needed + 1} epochs", None
        if latest >= earliest:
            fix += f", or plant earlier: {kind}:first={latest}"
            valid = f"epochs {earliest} to {latest}"
        what = f"The first planting of controller {kind!r} is too late to become permanent"
        raise EsperError(what, given=f"epoch {first} of {horizon}", valid=valid, fix=fix)


@dataclass(frozen=True, kw_only=True)
class Periodic(_Trigger):
    """Plants the next of its places every so many epochs."""

    kind: ClassVar[str] = "periodic"
    every: Count = 6

    def _ready(self, signals: Signals) -> Tensor:
        return youngest(signals) >= self.every


@dataclass(frozen=True, kw_only=True)
class Plateau(_Trigger):
    """Plants when validation accuracy has stopped rising."""

    kind: ClassVar[str] = "plateau"
    patience: Annotated[int, replace(_REMEMBERED, least=1)] = 3  # epochs without a rise, and apart
    delta: float = 1.0  # points that count as a rise

    def _ready(self, signals: Signals) -> Tensor:
        still = plateaued(signals.validation_accuracy, self.patience, self.delta)
        return still & (youngest(signals) >= self.patience)


@dataclass(frozen=True, kw_only=True)
class Gap(_Trigger):
    """Plants while the host underfits: its training loss is high and validation is no worse.

    A gap between validation and training loss means that capacity is not what is missing.
    """

    kind: ClassVar[str] = "gap"
    most_gap: float = 0.1  # validation minus training loss, in units of guessing
    least_loss: float = 0.3  # training loss, in units of guessing
    spacing: Count = 4  # epochs between two plantings

    def _ready(self, signals: Signals) -> Tensor:
        train, gap = relative_losses(signals)
        underfits = (gap <= self.most_gap) & (train >= self.least_loss)  # false for NaN
        return underfits & (youngest(signals) >= self.spacing)


OWN_SETTINGS: tuple[type[OwnSettings], ...] = (NeverGrow, RandomLegal, Periodic, Plateau, Gap)


@dataclass(frozen=True, kw_only=True)
class HeuristicConfig(RuleSettings):
    """The default rule's settings."""

    kind: ClassVar[str] = "heuristic"
    # Where and how to plant
    places: tuple[str, ...] = EVERYWHERE  # slot/blueprint in order of preference; * for any
    blend: Blend = Blend.IMMEDIATE
    train: Count = DEFAULT_MIN_TRAINING_EPOCHS  # epochs in isolation, unless immediate
    # When to plant
    first: Whole = 2  # no planting before this epoch
    spacing: Count = 2  # epochs between two plantings
    patience: Patience = 2  # epochs without a rise of accuracy; 0: plant without a plateau
    delta: float = 2.0  # points that count as a rise
    most_gap: float | None = None  # no planting above this gap of losses, in units of guessing
    together: Count = 1  # seeds on trial at once
    seeds: Count | None = None  # at most so many kept and on trial; None: one in every slot
    # What to keep
    probation: Count = 3  # epochs in HOLDING before a seed may be kept
    trial: int = 6  # epochs in HOLDING after which a seed that is not worth it is pruned
    margin: float = 0.5  # points of contribution that a seed must be worth
    rent: float = DEFAULT_RENT  # and as many more per 100 % of the host's parameters

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trial < self.probation:
            raise EsperError(
                "The trial of controller 'heuristic' ends before its probation",
                given=f"trial {self.trial}, probation {self.probation}",
                valid="a trial at least as long",
            )


class Heuristic:
    """Plants in order of preference and judges each seed by its contribution.

    A seed that is worth its parameters is made permanent after its probation; one that is not by
    the end of its trial is pruned, and that place is not tried again in the episode.
    """

    needs_contributions = True

    def __init__(self, config: HeuristicConfig | None = None) -> None:
        self.config = config or HeuristicConfig()
        self.name = self.config.name
        self._tried: Tensor | None = None  # [N, C] bool

    def memory(self) -> dict[str, Tensor]:
        return {} if self._tried is None else {"tried": self._tried}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        self._tried = memory.get("tried")

    def require_possible(self, catalogue: BlueprintCatalogue, horizon: int) -> None:
        find_places(self.config.places, catalogue)
        require_first_in_time("heuristic", self.config.first, self._needed(), horizon)

    def _needed(self) -> int:
        """Epochs from planting until a seed may be kept."""
        config = self.config
        return epochs_to_permanence(config.blend, config.train) + config.probation - 1

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        places = find_places(self.config.places, signals.catalogue)
        fresh = torch.zeros(len(signals), len(places), dtype=torch.bool)
        tried = restarted(self._tried, fresh, starts)
        open_ = open_plants(legality, self.config.blend)[:, places[:, 0], places[:, 1]]
        plant = first_plant(self._ready(signals), open_ & ~tried, places, self.config.blend)
        kept = judged(signals, legality, self.config, train=self.config.train)
        actions = first_legal(legality, [*kept, plant])
        planted = actions["op"] == LifecycleOp.GERMINATE
        here = torch.stack([actions["slot"], actions["blueprint"]], 1)  # [N, 2]
        self._tried = tried | planted[:, None] & (here[:, None] == places).all(2)
        return actions

    def _ready(self, signals: Signals) -> Tensor:
        """[N] bool: is it time for the next seed?"""
        config, life = self.config, signals.lifecycle
        on_trial = life.at(*sorted(LIVING_STAGES)).sum(1)
        when = plateaued(signals.validation_accuracy, config.patience, config.delta)
        when &= (life.epoch >= config.first) & (youngest(signals) >= config.spacing)
        when &= (on_trial < config.together) & in_time(signals, self._needed())
        if config.seeds is not None:
            when &= on_trial + life.at(SeedStage.FOSSILIZED).sum(1) < config.seeds
        if config.most_gap is not None:
            when &= relative_losses(signals)[1] <= config.most_gap  # false for NaN
        return when
