"""The garden: contexts in which growing is a real decision, and suites of them."""

from esper.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
