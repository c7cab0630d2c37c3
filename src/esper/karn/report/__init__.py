"""Reports: what a run came to, as pictures and one page that needs nothing else."""

from esper.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
