"""nissa: the senses. Typed events, the run store and other sinks, anomaly detection."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .anomalies import AnomalyDetector, Thresholds
    from .clock import Clock
    from .events import (
        AnomalyFound,
        Attributed,
        Auditioned,
        CasesPlayed,
        Contributed,
        Decisions,
        Dropped,
        EpisodeEnded,
        EpochEnded,
        Evaluated,
        Event,
        GrowthEnded,
        LifecycleChanged,
        Noted,
        Refused,
        RolledBack,
        RunEnded,
        RunStarted,
        Sampled,
        Stepped,
        UpdateMetrics,
        flatten,
    )
    from .hub import DurableSink, Hub, Sink
    from .reader import Cell, DecisionRecord, RunReader, Table
    from .schema import RunLayout
    from .store import RunStore, StoreError
    from .trackers import MlflowSink, TensorBoardSink, WandbSink, open_sinks, require_sinks

__getattr__, __dir__, __all__ = attach(__name__)
