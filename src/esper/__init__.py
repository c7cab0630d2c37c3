"""Esper trains neural networks that grow while they train."""

__version__ = "0.1.0"

__all__ = ["__version__"]
