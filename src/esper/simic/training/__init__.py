"""Training of a controller: settings, run folders, the training loop and its evaluation."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .config import PRESETS, EvaluationConfig, TrainConfig, read_config, to_toml
    from .evaluator import EvalResult, Evaluator
    from .run_processes import GracefulShutdown, train_run
    from .trainer import RoundReport, Trainer
    from .training_runs import RunError, RunFolder, load_controller

__getattr__, __dir__, __all__ = attach(__name__)
