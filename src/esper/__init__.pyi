from .api.grow_loop import grow as grow
from .api.grow_loop import resume as resume
from .api.grow_settings import Budget as Budget
from .api.growing_model import wrap as wrap
from .api.inspection import inspect as inspect

__version__: str
