"""tolaria: the hands. Trains one host or a fused population; tasks, data and the governor."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .data.splits import Split, Splits, splits_from
    from .feed import Augmentation, Feed
    from .governor import Governor, Remedy, Trip
    from .optimisers import AdamW, Sgd
    from .population import Population, extract
    from .population_config import EpochRecord, PopulationConfig, Snapshot, SplitScores
    from .tasks import Task, find_task, population_of, register_task, task_names

__getattr__, __dir__, __all__ = attach(__name__)
