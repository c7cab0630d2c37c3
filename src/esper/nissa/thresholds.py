"""When a number of an update counts as wrong, for how long, and when it is right again."""

from dataclasses import dataclass

from esper.leyline.constants import HEAD_COUNT_FLOOR, RATIO_COLLAPSE, RATIO_EXPLOSION

ENTROPY_COLLAPSE = 0.001  # of a uniform choice among the legal actions
VALUE_COLLAPSE = 0.02  # spread of values / spread of returns, and variance explained
GRADIENT_VANISHING = 1e-6
GRADIENT_EXPLOSION = 100.0  # before clipping
MIN_CLIPPED = 0.3  # share of a head's steps: of thousands, one always has an extreme ratio
MIN_MATTERING_STEPS = 32  # below this a head's numbers say nothing
MIN_RETURN_SPREAD = 1e-3  # below this there is nothing to learn, and nothing collapsed
RECOVERY_FACTOR = 1.5  # an anomaly is over when the number is this much better than the threshold
CLEAR_AFTER = 3  # good updates in a row
RATIO_PATIENCE = 3  # bad updates in a row
ENTROPY_PATIENCE = 5
VALUE_PATIENCE = 10
GRADIENT_PATIENCE = 5


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """All that a detector can be set to."""

    ratio_explosion: float = RATIO_EXPLOSION
    ratio_collapse: float = RATIO_COLLAPSE
    entropy_collapse: float = ENTROPY_COLLAPSE
    value_collapse: float = VALUE_COLLAPSE
    gradient_vanishing: float = GRADIENT_VANISHING
    gradient_explosion: float = GRADIENT_EXPLOSION
    min_clipped: float = MIN_CLIPPED
    min_mattering_steps: int = MIN_MATTERING_STEPS
    min_return_spread: float = MIN_RETURN_SPREAD
    recovery_factor: float = RECOVERY_FACTOR
    clear_after: int = CLEAR_AFTER
    ratio_patience: int = RATIO_PATIENCE
    entropy_patience: int = ENTROPY_PATIENCE
    value_patience: int = VALUE_PATIENCE
    gradient_patience: int = GRADIENT_PATIENCE
    # How the learner averages a head's entropy: over at least this share of all steps.
    head_count_floor: float = HEAD_COUNT_FLOOR
