"""rl: the learner for worlds of one's own. Train, evaluate and act in Gymnasium's environments."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .gym_worlds import SAME_STEP, GymError, GymWorld, make_gym
    from .learning import PRESETS, Player, evaluate, train

__getattr__, __dir__, __all__ = attach(__name__)
