"""Rewards: what a step was worth, as a function of (state, next state) alone.

A state knows validation scores only as gains over the paired control, the same environment never
grown, so the host's own progress cannot be claimed. Everything is in points of accuracy until it
is divided by the scale of the environment's family. docs/rewards.md derives the formulas.

Shapes: `N` environments, `S` slots, `K` epochs that are scored, `T` epochs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.garden.reward_settings import MODES, RewardConfig
from esper.leyline.constants import (
    BLENDING_POTENTIAL,
    DEFAULT_RENT,
    DEFAULT_SHAPING_WEIGHT,
    FOSSILIZED_POTENTIAL,
    GERMINATED_POTENTIAL,
    HOLDING_POTENTIAL,
    MIN_REWARD_SCALE,
    SCORED_EPOCHS,
    SHAPING_SHARE,
    TRAINING_POTENTIAL,
)
from esper.leyline.errors import AgreementError
from esper.leyline.lifecycle import Lifecycle
from esper.leyline.stages import SeedStage

_STAGE_POTENTIAL = torch.zeros(len(SeedStage), dtype=torch.float64)
for _stage, _points in (
    (SeedStage.GERMINATED, GERMINATED_POTENTIAL),
    (SeedStage.TRAINING, TRAINING_POTENTIAL),
    (SeedStage.BLENDING, BLENDING_POTENTIAL),
    (SeedStage.HOLDING, HOLDING_POTENTIAL),
    (SeedStage.FOSSILIZED, FOSSILIZED_POTENTIAL),
):
    _STAGE_POTENTIAL[_stage] = _points


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

    def __post_init__(self) -> None:
        hosts = self.lifecycle.shape[0]
        for field in fields(self):
            value = getattr(self, field.name)
            shape = (hosts, SCORED_EPOCHS) if field.name == "committed_gain" else (hosts,)
            if isinstance(value, Tensor) and tuple(value.shape) != shape:
                raise AgreementError(
                    f"{field.name!r} of a reward state has the wrong shape",
                    given=list(value.shape),
                    valid=list(shape),
                )

    @classmethod
    def start(cls, lifecycle: Lifecycle, horizon: Tensor) -> "RewardState":
        """The beginning of an episode: nothing is measured, nothing is owed."""
        hosts = lifecycle.shape[0]
        return cls(
            epoch=torch.zeros(hosts, dtype=torch.int64),
            horizon=horizon,
            committed_gain=torch.full((hosts, SCORED_EPOCHS), torch.nan, dtype=torch.float64),
            current_gain=torch.full((hosts,), torch.nan, dtype=torch.float64),
            exposure=torch.zeros(hosts, dtype=torch.float64),
            interventions=torch.zeros(hosts, dtype=torch.int64),
            rolled_back=torch.zeros(hosts, dtype=torch.bool),
            lifecycle=lifecycle,
        )

    def advance(
        self,
        lifecycle: Lifecycle,
        *,
        decided: Tensor,
        added_share: Tensor,
        committed: Tensor,
        current: Tensor,
        control: Tensor,
        rolled_back: Tensor | None = None,
    ) -> "RewardState":
        """The state one decision and one epoch later; [N] each, scores in points.

        `decided`: was it another op than WAIT? `added_share`: parameters in seeds during the epoch
        / the host's. Where it was rolled back scores stay what they were, but the decision and the
        epoch's rent are owed. An episode that is over does not change any more.
        """
        over = self.ended
        failed = torch.zeros_like(over) if rolled_back is None else rolled_back
        kept = over | failed
        latest = (committed - control).double()[:, None]
        shifted = torch.cat((self.committed_gain[:, 1:], latest), 1)
        rent = added_share.double() / self.horizon
        return RewardState(
            epoch=self.epoch + (~over).long(),
            horizon=self.horizon,
            committed_gain=torch.where(kept[:, None], self.committed_gain, shifted),
            current_gain=torch.where(kept, self.current_gain, (current - control).double()),
            exposure=self.exposure + rent.masked_fill(over, 0.0),
            interventions=self.interventions + (decided & ~over).long(),
            rolled_back=self.rolled_back | (failed & ~over),
            lifecycle=lifecycle,
        )

    @property
    def ended(self) -> Tensor:
        """[N] bool: a terminal state, by the horizon or by a rollback."""
        return self.rolled_back | (self.epoch >= self.horizon)

    @property
    def objective(self) -> Tensor:
        """[N] mean gain of the committed network over the last epochs; 0 before the first."""
        return self.committed_gain.nanmean(1).nan_to_num(nan=0.0)


class RewardTerms(Mapping[str, Tensor]):
    """The terms of a mode, [N] each; their sum, in this order, is the reward to the bit."""

    def __init__(self, mode: str, terms: Mapping[str, Tensor]) -> None:
        self._terms = {name: terms[name] for name in MODES[mode]}

    def __getitem__(self, name: str) -> Tensor:
        return self._terms[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._terms)

    def __len__(self) -> int:
        return len(self._terms)

    def __repr__(self) -> str:
        return f"RewardTerms({self._terms!r})"

    @property
    def total(self) -> Tensor:
        """[N]: the reward."""
        first, *others = self._terms.values()
        total = first
        for term in others:
            total = total + term
        return total


def rewards(
    before: RewardState, after: RewardState, scale: Tensor, config: RewardConfig
) -> RewardTerms:
    """What each environment's step was worth, in units of `scale` [N]; 0 once it is over."""
    _check(before, after, scale)
    owed = {
        "objective": (before.objective, after.objective),
        "rent": (-config.rent * before.exposure, -config.rent * after.exposure),
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


def potential(state: RewardState, weight: float = DEFAULT_SHAPING_WEIGHT) -> Tensor:
    """[N] points: how far along a state is; 0 where an episode begins and where it is over.

    A share of what the score would still rise to if the network stayed as it is, which is not
    touched by FOSSILIZE and fades as the score catches up; and each seed's stage.
    """
    promise = (state.current_gain - state.objective).clamp(min=0.0)
    # Whole numbers are counted first, so that the order of the slots does not change a bit.
    stages = torch.nn.functional.one_hot(state.lifecycle.stage, len(SeedStage)).sum(1).double()
    points = SHAPING_SHARE * promise + stages @ _STAGE_POTENTIAL
    return (weight * points).masked_fill((state.epoch == 0) | state.ended, 0.0)


def added_share(lifecycle: Lifecycle, host_params: Tensor | int) -> Tensor:
    """[N]: parameters that exist in seeds, as a share of the host's."""
    return lifecycle.params.sum(1).double() / host_params


def rent_exposure(added_shares: Tensor, horizon: Tensor | int) -> Tensor:
    """Added shares of each epoch [..., T] summed and divided by the horizon [...]."""
    return added_shares.double().sum(-1) / horizon


def net_score(last_scores: Tensor, exposure: Tensor, rent: float = DEFAULT_RENT) -> Tensor:
    """The score of an episode in points: the mean of [..., K] less the rent for [...].

    Of accuracies of the committed network: its net score. Of its gains over the control: its net
    gain, which is what `sparse` pays at the end.
    """
    if last_scores.shape[-1:] != (SCORED_EPOCHS,):
        raise AgreementError(
            "A net score is taken over the last epochs",
            given=f"scores {list(last_scores.shape)}",
            valid=f"[..., {SCORED_EPOCHS}]",
        )
    return last_scores.double().mean(-1) - rent * exposure


def reward_scale(best_net_gain: Tensor) -> Tensor:
    """What rewards of a family are divided by, from the net gain of its best known arm."""
    return best_net_gain.double().clamp(min=MIN_REWARD_SCALE)


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
                fix="carry the state on by advance(); a rollback does not take it back",
            )
