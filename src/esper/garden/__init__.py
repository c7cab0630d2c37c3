"""The garden as an environment: episodes, rewards, controls, evaluation and the atlas."""

from esper.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
