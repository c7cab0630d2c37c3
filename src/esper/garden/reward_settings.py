"""Settings of the reward, without torch, so that the command line can show them at once."""

from collections.abc import Mapping
from dataclasses import dataclass

from esper.leyline import AgreementError, constants
from esper.leyline.errors import require_known
from esper.leyline.settings import NotNegative, Positive, Share, require_settings

MODES: Mapping[str, tuple[str, ...]] = {
    "shaped": ("objective", "rent", "caution", "interventions", "shaping", "rollback"),
    "simplified": ("objective", "rent", "caution", "interventions", "rollback"),
    "sparse": ("objective", "rent", "caution", "rollback"),
}
"""The modes from dense to sparse, and the terms of each in the order in which they are summed."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What is paid for; saved with every checkpoint."""

    mode: str = "shaped"
    # Points for 100 % of the host's parameters over an episode.
    rent: NotNegative = constants.DEFAULT_RENT
    caution: Positive = constants.DEFAULT_CAUTION  # as so many points counts one that is lost
    intervention_cost: NotNegative = constants.DEFAULT_INTERVENTION_COST  # points
    shaping_weight: NotNegative = constants.DEFAULT_SHAPING_WEIGHT
    # The learner's: with another one shaping does not cancel.
    gamma: Share = constants.DEFAULT_GAMMA
    rollback_penalty: Positive = constants.DEFAULT_ROLLBACK_PENALTY  # points

    def __post_init__(self) -> None:
        require_known("reward mode", self.mode, MODES)
        require_settings(self, "The reward's setting", error=AgreementError)

    def check_budget(self, largest_share: float) -> None:
        """Refuse seeds so large, as a share of the host, that a rollback could save rent."""
        if self.rent * largest_share >= self.rollback_penalty:
            raise AgreementError(
                "The penalty for a rollback must exceed any rent it saves",
                given=f"penalty {self.rollback_penalty:g} points, rent up to "
                f"{self.rent:g} x {largest_share:g} = {self.rent * largest_share:g}",
                fix="raise rollback_penalty, or lower the budget or the rent",
            )
