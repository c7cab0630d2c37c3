"""api: grow your own network. One call, or four in a loop of your own."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .auditing import audit
    from .ema import GrowingAverage
    from .grow_loop import grow, load_run, resume
    from .grow_settings import Budget, GrowSettings
    from .growing_model import ForgottenTickWarning, GrowingModel, GrowthLostWarning, wrap
    from .grown_runs import GrownRun, GrowthFolder, Report, SeedLife, read_report
    from .inspection import Inspection, inspect
    from .scoring import score_of_loss
    from .ticking import FractionWarning, GrowthDecision, StageChange, Tick

__getattr__, __dir__, __all__ = attach(__name__)
