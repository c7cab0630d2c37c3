"""The learner: rollout buffer, advantages, and recurrent PPO with factored, masked actions."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from esper.tamiyo.features import signals_to_features

    from .advantages import compute_gae, compute_per_head_advantages
    from .ppo import PPOAgent, initial_weights
    from .ppo_config import PPOConfig
    from .rollout import collect
    from .rollout_buffer import NonFiniteError, RolloutError, TamiyoRolloutBuffer
    from .types import (
        CHECKPOINT_VERSION,
        ActionDict,
        Decision,
        HeadEntropies,
        HeadGradientNorms,
        HeadLogProbs,
        Outcome,
        PerHeadAdvantages,
        PPOUpdateMetrics,
        SequenceBatch,
    )
    from .update import StoredLogProbError

__getattr__, __dir__, __all__ = attach(__name__)
