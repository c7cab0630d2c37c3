"""Esper trains neural networks that grow while they train."""

from esper.lazy import attach

__version__ = "0.1.0"

__getattr__, __dir__, _exported = attach(__name__)
__all__ = ["__version__", *_exported]
