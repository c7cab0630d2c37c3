"""TensorBoard as a sink: curves of updates, episodes, evaluations and samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from esper.leyline.errors import EsperError
from esper.nissa.events import (
    AnomalyFound,
    EpisodeEnded,
    Evaluated,
    Event,
    Noted,
    Sampled,
    UpdateMetrics,
)


class TensorBoardSink:
    """Curves over rounds. Decisions, steps and lifecycles are only in the run store."""

    name = "TensorBoard"

    def __init__(self, path: str | Path, writer: Any = None) -> None:
        """`writer`: something like `torch.utils.tensorboard.SummaryWriter`, in place of one."""
        if writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise EsperError(
                    "TensorBoard is not installed", fix="pip install 'esper-ml[tensorboard]'"
                ) from error
            writer = SummaryWriter(path)
        self._writer = writer

    def write(self, batch: Sequence[Event]) -> None:
        for event in batch:
            for tag, value in _curves(event):
                self._writer.add_scalar(tag, value, event.round)
            if isinstance(event, AnomalyFound):
                self._writer.add_text("anomalies", str(event), event.round)
            elif isinstance(event, Noted):
                self._writer.add_text("notes", event.text, event.round)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _curves(event: Event) -> list[tuple[str, float]]:
    if isinstance(event, UpdateMetrics):
        return [(f"update/{name.replace('.', '/')}", v) for name, v in event.metrics.items()]
    if isinstance(event, EpisodeEnded) and len(event.env):
        names = ("returns", "net_gain", "validation", "added", "interventions", "rolled_back")
        return [(f"episode/{name}", float(np.mean(getattr(event, name)))) for name in names]
    if isinstance(event, Evaluated):
        pairs = zip(event.context, event.score.tolist(), strict=True)
        return [(f"evaluation/{event.controller}/{context}", score) for context, score in pairs]
    if isinstance(event, Sampled):
        return [(f"sample/{name}", value) for name, value in event.values.items()]
    return []
