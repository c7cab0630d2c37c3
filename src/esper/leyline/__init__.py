"""leyline: the shared language. Stages, ops, heads, slots, arrays, protocols, errors, constants."""

from esper.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
