"""Training a controller: settings, run directories, the loop and what it leaves behind."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .config import PRESETS, EvaluationConfig, TrainConfig, read_config, to_toml
    from .run_processes import Stopping, train_run
    from .selection import Judge, Judgement
    from .trainer import RoundReport, Trainer
    from .training_runs import RunError, RunFolder, load_controller

__getattr__, __dir__, __all__ = attach(__name__)
