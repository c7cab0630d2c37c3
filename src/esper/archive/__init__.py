"""What is kept: archives of tensors, files that are never half written, and folders of runs."""

from esper.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
