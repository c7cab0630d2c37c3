"""show: what people look at. Progress in a terminal, pictures, and pages that need nothing else."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .report import write_report

__getattr__, __dir__, __all__ = attach(__name__)
