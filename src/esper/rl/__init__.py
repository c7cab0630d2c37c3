"""rl: the learner for Gymnasium environments. Train, evaluate, and act with a trained agent.

This is the public name of `esper.simic.gym`.
"""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from esper.simic.gym.training import PRESETS, Player, evaluate, train
    from esper.simic.gym.worlds import SAME_STEP, GymError, GymWorld, make_gym

__getattr__, __dir__, __all__ = attach(__name__)
