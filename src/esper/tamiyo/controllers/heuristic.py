"""The default rule: grow on a plateau, try one seed at a time, keep what pays its rent.

Shapes: `N` environments, `S` slots, `C` places.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.constants import DEFAULT_MIN_TRAINING_EPOCHS, DEFAULT_RENT
from esper.leyline.errors import EsperError
from esper.leyline.legality import Actions, Legality
from esper.leyline.ops import Blend, LifecycleOp
from esper.leyline.signals import Signals
from esper.leyline.stages import LIVING_STAGES, SeedStage
from esper.tamiyo.controllers.places import (
    EVERYWHERE,
    find_places,
    require_at_least,
    require_places,
)
from esper.tamiyo.controllers.proposals import (
    Proposal,
    at_best_slot,
    closing,
    epochs_to_permanence,
    first_legal,
    first_plant,
    in_time,
    open_plants,
    open_slots,
    youngest,
)
from esper.tamiyo.controllers.protocol import restarted
from esper.tamiyo.controllers.specs import spec_of
from esper.tamiyo.controllers.triggers import (
    plateaued,
    relative_losses,
    require_first_in_time,
    require_patience,
)


@dataclass(frozen=True, kw_only=True)
class HeuristicConfig:
    """The default rule's settings."""

    # Where and how to plant
    places: tuple[str, ...] = EVERYWHERE  # slot/blueprint in order of preference; * for any
    blend: Blend = Blend.IMMEDIATE
    train: int = DEFAULT_MIN_TRAINING_EPOCHS  # epochs in isolation, unless immediate
    # When to plant
    first: int = 2  # no planting before this epoch
    spacing: int = 2  # epochs between two plantings
    patience: int = 2  # epochs without a rise of accuracy; 0: plant without a plateau
    delta: float = 2.0  # points that count as a rise
    most_gap: float | None = None  # no planting above this gap of losses, in units of guessing
    together: int = 1  # seeds on trial at once
    seeds: int | None = None  # at most so many kept and on trial; None: one in every slot
    # What to keep
    probation: int = 3  # epochs in HOLDING before a seed may be kept
    trial: int = 6  # epochs in HOLDING after which a seed that is not worth it is pruned
    margin: float = 0.5  # points of contribution that a seed must be worth
    rent: float = DEFAULT_RENT  # and as many more per 100 % of the host's parameters

    def __post_init__(self) -> None:
        require_places(self.places)
        require_patience("heuristic", self.patience, 0)
        counts = (("train", 1), ("first", 0), ("spacing", 1), ("together", 1), ("probation", 1))
        for name, least in counts:
            require_at_least(
                least, f"Setting {name!r} of controller 'heuristic'", getattr(self, name)
            )
        if self.seeds is not None:
            require_at_least(1, "Setting 'seeds' of controller 'heuristic'", self.seeds)
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
        self._tried: Tensor | None = None  # [N, C] bool

    @property
    def name(self) -> str:
        return spec_of("heuristic", self.config)

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
        actions = first_legal(legality, [*self._judged(signals, legality), plant])
        planted = actions["op"] == LifecycleOp.GERMINATE
        here = torch.stack([actions["slot"], actions["blueprint"]], 1)  # [N, 2]
        self._tried = tried | planted[:, None] & (here[:, None] == places).all(2)
        return actions

    def _judged(self, signals: Signals, legality: Legality) -> list[Proposal]:
        """Keep, blend in, take out."""
        config, life = self.config, signals.lifecycle
        share = life.params / max(signals.catalogue.host_params, 1)  # [N, S]
        needed = config.margin + config.rent * share
        worth = life.contribution_known & (life.contribution >= needed)
        late = closing(signals)[:, None]
        holding = life.at(SeedStage.HOLDING)
        keep = worth & ((life.epochs_in_stage >= config.probation) | late)
        over = life.contribution_known & ((life.epochs_in_stage >= config.trial) | late)
        ripe = open_slots(legality, LifecycleOp.ADVANCE) & (life.epochs_in_stage >= config.train)
        return [
            at_best_slot(
                LifecycleOp.FOSSILIZE,
                keep & open_slots(legality, LifecycleOp.FOSSILIZE),
                life.contribution - needed,
            ),
            at_best_slot(LifecycleOp.ADVANCE, ripe),
            at_best_slot(LifecycleOp.PRUNE, holding & over & ~worth, needed - life.contribution),
        ]

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
