"""api: grow your own network. One call, or four in a loop of your own."""

from esper.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
