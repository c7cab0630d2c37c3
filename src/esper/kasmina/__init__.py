"""kasmina: the body. Hosts, slots, seeds, blueprints, isolation, blending, lifecycle, export."""

from esper.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
