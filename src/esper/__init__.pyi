from .api.budgets import Budget as Budget
from .api.growing import grow as grow
from .api.hosts import wrap as wrap
from .api.inspection import inspect as inspect
from .api.resuming import resume as resume

__version__: str
