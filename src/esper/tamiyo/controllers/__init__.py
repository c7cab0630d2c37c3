"""Who decides: never, at random, by schedule, by rule, by knowing the answer, or learned."""

from esper.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
