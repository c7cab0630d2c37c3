"""A race between seeds: plant several, measure each for some epochs, keep the best.

Shapes: `N` environments, `S` slots, `C` candidates.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esper.leyline import Actions, Blend, BlueprintCatalogue, Legality, LifecycleOp
from esper.leyline.constants import DEFAULT_RENT, SCORED_EPOCHS
from esper.leyline.errors import EsperError, require_known
from esper.leyline.settings import Count, Whole
from esper.leyline.signals import Signals
from esper.leyline.stages import LIVING_STAGES, SeedStage
from esper.tamiyo.controllers.proposals import (
    at_best_slot,
    closing,
    first_legal,
    first_plant,
    in_time,
    open_plants,
)
from esper.tamiyo.controllers.protocol import restarted
from esper.tamiyo.controllers.specs import EVERYWHERE, RuleSettings, find_places

MEASURES = ("contribution", "gain")
_RESTING = (SeedStage.PRUNED, SeedStage.EMBARGOED, SeedStage.RESETTING)


@dataclass(frozen=True, kw_only=True)
class RaceConfig(RuleSettings):
    kind: ClassVar[str] = "race"
    places: tuple[str, ...] = EVERYWHERE  # the candidates; unless in turns, the first in each slot
    turns: bool = False  # one after the other: the first above the threshold wins
    first: Whole = 1  # epoch of the first planting
    spacing: Count = 1  # epochs between two plantings; of no meaning in turns
    epochs: Count = 7  # over which a candidate is measured
    measure: str = "contribution"  # by leaving it out; or the gain in accuracy since its planting
    threshold: float = 1.0  # points a winner must be worth, after rent
    rent: float = DEFAULT_RENT  # points per 100 % of the host's parameters
    keep: Count = 1  # how many may win

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known("measure of controller 'race'", self.measure, MEASURES)


@dataclass
class _Memory:
    """What a race remembers of its rows."""

    used: Tensor  # [N, C] bool: planted, or given up
    before: Tensor  # [N, S] float64: accuracy when the seed here was planted
    score: Tensor  # [N, S] float64: its measured worth; NaN until then
    kept: Tensor  # [N, S] bool
    condemned: Tensor  # [N, S] bool
    over: Tensor  # [N] bool: no more planting

    @classmethod
    def fresh(cls, hosts: int, slots: int, candidates: int) -> "_Memory":
        over = torch.zeros(hosts, dtype=torch.bool)
        used, kept, condemned = (over[:, None].repeat(1, n) for n in (candidates, slots, slots))
        unknown = torch.full((hosts, slots), torch.nan, dtype=torch.float64)
        return cls(used, unknown, unknown.clone(), kept, condemned, over)


class Race:
    """Candidates run against each other, all with the immediate blend; the best are kept.

    Together they are planted one an epoch in different slots, judged when all are measured, and
    all but the best are pruned. In turns each is judged alone: kept if it is worth it, and then
    the race is over; otherwise pruned, and the next one is planted.
    """

    def __init__(self, config: RaceConfig | None = None) -> None:
        self.config = config or RaceConfig()
        self.name = self.config.name
        self.needs_contributions = self.config.measure == "contribution"
        self._memory: _Memory | None = None

    def memory(self) -> dict[str, Tensor]:
        return {} if self._memory is None else dict(vars(self._memory))

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        self._memory = _Memory(**memory) if memory else None

    def require_possible(self, catalogue: BlueprintCatalogue, horizon: int) -> None:
        config = self.config
        runners = len(self._candidates(catalogue))
        start = config.first + (0 if config.turns else config.spacing * max(runners - 1, 0))
        latest = horizon - SCORED_EPOCHS
        if start + config.epochs > latest:
            raise EsperError(
                "The race does not end in time to keep its winner",
                given=f"{runners} candidates from epoch {config.first}, measured for "
                f"{config.epochs}: judged at {start + config.epochs}",
                valid=f"judged by epoch {latest} of {horizon}" if latest > 0 else None,
                fix=f"train for at least {start + config.epochs + SCORED_EPOCHS} epochs",
            )

    def _candidates(self, catalogue: BlueprintCatalogue) -> Tensor:
        """[C, 2]"""
        places = find_places(self.config.places, catalogue)
        if self.config.turns:
            return places
        slots = places[:, 0].tolist()
        return places[[place for place, slot in enumerate(slots) if slot not in slots[:place]]]

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        life = signals.lifecycle
        places = self._candidates(signals.catalogue)
        last = {} if self._memory is None else vars(self._memory)
        fresh = vars(_Memory.fresh(*life.shape, len(places)))
        memory = self._memory = _Memory(
            **{name: restarted(last.get(name), blank, starts) for name, blank in fresh.items()}
        )
        present = life.at(*sorted(LIVING_STAGES))  # [N, S]
        memory.kept &= present
        memory.condemned &= present
        memory.score.masked_fill_(~present, torch.nan)
        self._judge(memory, signals, present)

        open_ = open_plants(legality, Blend.IMMEDIATE)[:, places[:, 0], places[:, 1]]  # [N, C]
        due = self._due(memory, signals, present)
        resting = life.at(*_RESTING)[:, places[:, 0]]
        memory.used |= due & ~open_ & ~resting  # its slot is taken or it is too dear
        plant = first_plant(due.any(1), due & open_, places, Blend.IMMEDIATE)
        keep = at_best_slot(legality, LifecycleOp.FOSSILIZE, memory.kept, memory.score)
        prune = at_best_slot(legality, LifecycleOp.PRUNE, memory.condemned)
        actions = first_legal(legality, [keep, prune, plant])
        planted = actions["op"] == LifecycleOp.GERMINATE
        here = torch.stack([actions["slot"], actions["blueprint"]], 1)  # [N, 2]
        memory.used |= planted[:, None] & (here[:, None] == places).all(2)
        into = planted[:, None] & (actions["slot"][:, None] == torch.arange(life.shape[1]))
        now = signals.latest("validation_accuracy").double()[:, None]
        memory.before = torch.where(into, now, memory.before)
        return actions

    def _judge(self, memory: _Memory, signals: Signals, present: Tensor) -> None:
        """Measure candidates that have run long enough, and decide whose race is over."""
        config, life = self.config, signals.lifecycle
        racing = present & ~memory.kept & ~memory.condemned
        if config.measure == "contribution":
            worth = life.contribution.masked_fill(~life.contribution_known, torch.nan)
        else:
            worth = signals.latest("validation_accuracy").double()[:, None] - memory.before
        worth = worth - config.rent * life.params / max(signals.catalogue.host_params, 1)
        late = closing(signals)[:, None]  # [N, 1]
        ready = racing & memory.score.isnan() & ((life.age >= config.epochs) | late)
        memory.score = torch.where(ready, worth, memory.score)
        known = ~memory.score.isnan()
        if config.turns:
            judged = racing & (known | late)
        else:
            finished = memory.used.all(1) & (known | ~racing).all(1)
            judged = racing & (finished[:, None] | late)
        ranked = memory.score.masked_fill(~(judged & known), -math.inf)
        better = (ranked[:, None] > ranked[:, :, None]).sum(2)  # [N, S]: how many beat this one
        wins = judged & known & (ranked > config.threshold) & (better < config.keep)
        memory.kept |= wins
        memory.condemned |= judged & ~wins
        memory.over |= (wins if config.turns else judged).any(1) | late[:, 0]

    def _due(self, memory: _Memory, signals: Signals, present: Tensor) -> Tensor:
        """[N, C] bool: candidates whose turn it is."""
        config, epoch = self.config, signals.lifecycle.epoch
        waiting = ~memory.used
        may = ~memory.over & in_time(signals, config.epochs)
        if config.turns:
            is_next = waiting & (waiting.cumsum(1) == 1)
            return is_next & (may & ~present.any(1) & (epoch >= config.first))[:, None]
        starts_at = config.first + config.spacing * torch.arange(waiting.shape[1])
        memory.used |= ~in_time(signals, config.epochs)[:, None]
        return waiting & may[:, None] & (epoch[:, None] >= starts_at)
