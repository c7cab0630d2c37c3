"""simic.agent: the learner. Rollout buffer, advantages, recurrent factored masked PPO."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .advantages import compute_per_head_advantages, generalised_advantages
    from .ppo import PPOAgent
    from .ppo_config import PPOConfig
    from .processes import Processes, ProcessesError
    from .rollout_buffer import NonFiniteError, RolloutError, TamiyoRolloutBuffer
    from .rollouts import VectorWorld, collect
    from .types import Decision, Outcome, SequenceBatch
    from .update import StoredLogProbError

__getattr__, __dir__, __all__ = attach(__name__)
