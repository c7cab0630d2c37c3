"""The learner for Gymnasium environments. Importing this package does not import gymnasium."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .training import PRESETS, Player, evaluate, train
    from .worlds import SAME_STEP, GymError, GymWorld, make_gym

__getattr__, __dir__, __all__ = attach(__name__)
