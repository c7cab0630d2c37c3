"""Small data sets that need no download, ready for `esper.grow`.

train, val, test = esper.datasets.mnist1d()
"""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .generated import mnist1d
    from .handwritten import digits
    from .splitting import DataSets

__getattr__, __dir__, __all__ = attach(__name__)
