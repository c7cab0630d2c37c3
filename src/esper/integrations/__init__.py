"""integrations: growing in training loops of other libraries, by a callback.

`esper.integrations.lightning` and `esper.integrations.transformers` need the extras of these names;
`grown` puts back what grew from the files that they write.
"""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .attached import IntegrationError, grown

__getattr__, __dir__, __all__ = attach(__name__)
