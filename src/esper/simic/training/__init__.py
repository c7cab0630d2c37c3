"""Training a controller: settings, run directories, the loop and what it leaves behind."""

from esper.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
