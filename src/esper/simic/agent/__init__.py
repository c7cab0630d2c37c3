"""simic.agent: the learner. Rollout buffer, advantages, recurrent factored masked PPO."""

from esper.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
