"""tolaria: the hands. Trains one host or a fused population; tasks, data and the governor."""

from esper.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
