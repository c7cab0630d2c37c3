"""Esper trains neural networks that grow while they train."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from . import datasets
    from .api.auditing import audit
    from .api.ema import ema
    from .api.grow_loop import grow, resume
    from .api.grow_settings import Budget
    from .api.growing_model import wrap
    from .api.inspection import inspect
    from .show.audit_facts import Audit

__version__ = "0.2.0"

__getattr__, __dir__, _exported = attach(__name__)
__all__ = ["__version__", *_exported]
