"""nissa: the senses. Typed events, the run store and other sinks, anomaly detection."""

from esper.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
