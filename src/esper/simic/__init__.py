"""Training of controllers: the PPO learner, its protocols and the training loop."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from esper.nissa.anomalies import AnomalyDetector
    from esper.tamiyo.features import signals_to_features

    from .agent.advantages import compute_per_head_advantages
    from .agent.ppo import PPOAgent
    from .agent.rollout_buffer import TamiyoRolloutBuffer

__getattr__, __dir__, __all__ = attach(__name__)
