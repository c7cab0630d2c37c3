"""Rewards: what a step was worth, as a function of (state, next state) alone.

A state knows validation scores only as gains over the paired control, the same environment never
grown, so the host's own progress cannot be claimed. Everything is in points of accuracy until it
is divided by the scale of the environment's family. docs/rewards.md derives the formulas.

Shapes: `N` environments, `S` slots, `K` epochs that are scored, `T` epochs of an episode.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from esper.garden.episodes import Ledger
from esper.garden.reward_settings import MODES, RewardConfig
from esper.leyline import AgreementError, Lifecycle, SeedStage, constants

V = TypeVar("V", float, Tensor)

_STAGE_POTENTIAL = torch.tensor(  # of a seed that is planted, GERMINATED_POTENTIAL and on
    [getattr(constants, f"{stage.name}_POTENTIAL", 0.0) for stage in SeedStage], dtype=torch.float64
)


@dataclass(frozen=True)
class RewardState:
    """All that the reward may look at. Counts only ever rise, also when a rollback undoes seeds."""

    epoch: Tensor  # [N] int64 epochs lived
    horizon: Tensor  # [N] int64 epochs of the whole episode
    committed_gain: Tensor  # [N, K] committed network - control, latest last; NaN before it exists
    current_gain: Tensor  # [N] the network as it is - control; NaN before the first epoch
    exposure: Tensor  # [N] sum over epochs of added / host parameters, divided by the horizon
    interventions: Tensor  # [N] int64 decisions other than WAIT
    rolled_back: Tensor  # [N] bool
    lifecycle: Lifecycle

    @classmethod
    def of(cls, ledger: Ledger, lifecycle: Lifecycle, control: Tensor) -> "RewardState":
        """What is owed now, of scores [N, T] of the paired controls.

        Where an epoch was rolled back scores stay what they were, but the decision and the epoch's
        rent are owed. An episode that is over does not change any more.
        """
        lived = ledger.lived.clone()
        scored = lived - ledger.rolled_back.long()
        places = scored[:, None] + torch.arange(-constants.SCORED_EPOCHS, 0)  # [N, K]
        gains = (ledger.committed - control).gather(1, places.clamp(min=0))
        current = ledger.at(ledger.current - control, scored - 1)
        return cls(
            epoch=lived,
            horizon=torch.full_like(lived, ledger.horizon),
            committed_gain=gains.masked_fill(places < 0, torch.nan),
            current_gain=current.masked_fill(scored < 1, torch.nan),
            exposure=ledger.at(ledger.exposure, lived - 1).masked_fill(lived < 1, 0.0),
            interventions=lifecycle.interventions + ledger.undone,
            rolled_back=ledger.rolled_back.clone(),
            lifecycle=lifecycle,
        )

    @property
    def ended(self) -> Tensor:
        """[N] bool: a terminal state, by the horizon or by a rollback."""
        return self.rolled_back | (self.epoch >= self.horizon)

    @cached_property
    def objective(self) -> Tensor:
        """[N] mean gain of the committed network over the last epochs; 0 before the first."""
        return self.committed_gain.nanmean(1).nan_to_num(nan=0.0)


class RewardTerms(dict[str, Tensor]):
    """The terms of a mode, [N] each; their sum, in this order, is the reward to the bit."""

    def __init__(self, mode: str, terms: Mapping[str, Tensor]) -> None:
        super().__init__({name: terms[name] for name in MODES[mode]})
        first, *others = self.values()
        self.total = sum(others, start=first)  # [N]: the reward


def net_of_rent(gain: V, exposure: V, rent: float) -> V:
    """A gain in points, less the rent for `exposure`: share of the host × share of the episode."""
    return gain - rent * exposure


def rewards(
    before: RewardState, after: RewardState, scale: Tensor, config: RewardConfig
) -> RewardTerms:
    """What each environment's step was worth, in units of `scale` [N]; 0 once it is over."""
    _check(before, after, scale)
    lost = (net_of_rent(each.objective, each.exposure, config.rent).clamp(max=0.0)
            for each in (before, after))  # fmt: skip
    owed = {
        "objective": (before.objective, after.objective),
        "rent": (-config.rent * before.exposure, -config.rent * after.exposure),
        "caution": tuple((config.caution - 1.0) * each for each in lost),
    }
    if config.mode == "sparse":
        terms = {name: last.masked_fill(~after.ended, 0.0) for name, (_, last) in owed.items()}
    else:
        terms = {name: later - earlier for name, (earlier, later) in owed.items()}
        made = (before.interventions - after.interventions).double()  # 0 or less
        terms["interventions"] = config.intervention_cost * made
    if config.mode == "shaped":
        future = config.gamma * potential(after, config.shaping_weight)
        terms["shaping"] = future - potential(before, config.shaping_weight)
    forfeit = config.rollback_penalty + after.objective.clamp(min=0.0)
    terms["rollback"] = (-forfeit).masked_fill(~after.rolled_back, 0.0)
    over = before.ended
    return RewardTerms(
        config.mode, {name: (term / scale).masked_fill(over, 0.0) for name, term in terms.items()}
    )


def potential(state: RewardState, weight: float = constants.DEFAULT_SHAPING_WEIGHT) -> Tensor:
    """[N] points: how far along a state is; 0 where an episode begins and where it is over.

    A share of what the score would still rise to if the network stayed as it is, which is not
    touched by FOSSILIZE and fades as the score catches up; and each seed's stage.
    """
    promise = (state.current_gain - state.objective).clamp(min=0.0)
    # Whole numbers are counted first, so that the order of the slots does not change a bit.
    stages = torch.nn.functional.one_hot(state.lifecycle.stage, len(SeedStage)).sum(1).double()
    points = constants.SHAPING_SHARE * promise + stages @ _STAGE_POTENTIAL
    return (weight * points).masked_fill((state.epoch == 0) | state.ended, 0.0)


def reward_scale(best_net_gain: Tensor) -> Tensor:
    """What rewards of a family are divided by, from the net gain of its best known arm."""
    return best_net_gain.double().clamp(min=constants.MIN_REWARD_SCALE)


def _check(before: RewardState, after: RewardState, scale: Tensor) -> None:
    if scale.shape != after.epoch.shape or not bool((scale > 0).all()):
        raise AgreementError(
            "Rewards need a positive scale for each environment",
            given=f"{list(scale.shape)}, smallest {float(scale.min()) if scale.numel() else None}",
            valid=list(after.epoch.shape),
        )
    for name in ("epoch", "exposure", "interventions"):
        earlier, later = getattr(before, name), getattr(after, name)
        if earlier.shape != later.shape or bool((later < earlier).any()):
            raise AgreementError(
                f"{name!r} of a reward state fell, and what was paid is never given back",
                given=f"{earlier.tolist()[:8]}, then {later.tolist()[:8]}",
                fix="compare states of one ledger; a rollback does not take back what it says",
            )
