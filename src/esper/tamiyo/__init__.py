"""tamiyo: the brain. Masked distributions, the recurrent factored actor-critic, controllers."""

from esper.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
