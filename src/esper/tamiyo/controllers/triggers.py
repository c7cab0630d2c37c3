"""Rules that plant the next of a list when something happens, and keep whatever they planted.

Shapes: `N` environments, `W` epochs remembered, `C` places.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.constants import DEFAULT_MIN_TRAINING_EPOCHS
from esper.leyline.errors import EsperError
from esper.leyline.legality import Actions, Legality
from esper.leyline.ops import Blend
from esper.leyline.signals import SIGNAL_WINDOW, Signals
from esper.tamiyo.controllers.places import (
    EVERYWHERE,
    find_places,
    require_at_least,
    require_places,
)
from esper.tamiyo.controllers.proposals import (
    epochs_to_permanence,
    first_legal,
    first_plant,
    in_time,
    open_plants,
    tended,
    youngest,
)
from esper.tamiyo.controllers.specs import OwnSettings


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


def require_patience(kind: str, patience: int, least: int) -> None:
    if not least <= patience < SIGNAL_WINDOW:
        raise EsperError(
            f"The patience of controller {kind!r} is out of range",
            given=patience,
            valid=f"{least} to {SIGNAL_WINDOW - 1} epochs, which signals remember",
        )


@dataclass(frozen=True, kw_only=True)
class _Trigger(OwnSettings):
    """When `_ready`, plants the first of its places that is open, and brings it on."""

    places: tuple[str, ...] = EVERYWHERE  # slot/blueprint in order; * for any
    blend: Blend = Blend.IMMEDIATE
    train: int = DEFAULT_MIN_TRAINING_EPOCHS  # epochs in isolation, unless immediate
    first: int = 3  # no planting before this epoch
    seeds: int | None = None  # at most so many in an episode; None: one in every slot

    def __post_init__(self) -> None:
        require_places(self.places)
        for name, least in (("train", 1), ("first", 0)):
            require_at_least(
                least, f"Setting {name!r} of controller {self.kind!r}", getattr(self, name)
            )
        if self.seeds is not None:
            require_at_least(1, f"Setting 'seeds' of controller {self.kind!r}", self.seeds)

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


def require_first_in_time(kind: str, first: int, needed: int, horizon: int) -> None:
    latest = horizon - 1 - needed
    if first > latest:
        longer = f"train for at least {first + needed + 1} epochs"
        raise EsperError(
            f"The first planting of controller {kind!r} is too late to become permanent",
            given=f"epoch {first} of {horizon}",
            valid=f"epochs 0 to {latest}" if latest >= 0 else None,
            fix=f"{longer}, or plant earlier: {kind}:first={latest}" if latest >= 0 else longer,
        )


@dataclass(frozen=True, kw_only=True)
class Periodic(_Trigger):
    """Plants the next of its places every so many epochs."""

    kind: ClassVar[str] = "periodic"
    every: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, "Setting 'every' of controller 'periodic'", self.every)

    def _ready(self, signals: Signals) -> Tensor:
        return youngest(signals) >= self.every


@dataclass(frozen=True, kw_only=True)
class Plateau(_Trigger):
    """Plants when validation accuracy has stopped rising."""

    kind: ClassVar[str] = "plateau"
    patience: int = 3  # epochs without a rise, and between two plantings
    delta: float = 1.0  # points that count as a rise

    def __post_init__(self) -> None:
        super().__post_init__()
        require_patience(self.kind, self.patience, 1)

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
    spacing: int = 4  # epochs between two plantings

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, "Setting 'spacing' of controller 'gap'", self.spacing)

    def _ready(self, signals: Signals) -> Tensor:
        train, gap = relative_losses(signals)
        underfits = (gap <= self.most_gap) & (train >= self.least_loss)  # false for NaN
        return underfits & (youngest(signals) >= self.spacing)
