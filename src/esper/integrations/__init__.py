"""integrations: growing in training loops of other libraries, by a callback.

`esper.integrations.lightning` and `esper.integrations.transformers` need the extras of these names.
"""
