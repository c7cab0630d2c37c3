"""Trackers as sinks: the curves, settings and texts of a run in TensorBoard, Weights & Biases and
MLflow. Their packages are imported when one of them is made.

A run is asked for them by name, or for any object with a `name`, `write(batch)` and `close()`.
Decisions and steps, and lifecycles of many environments, are only in the run store.
"""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from esper.leyline.errors import EsperError, Extra, in_words, install_hint, require_known
from esper.leyline.ops import cause_name
from esper.leyline.stages import SeedStage
from esper.nissa import events as told
from esper.nissa.hub import Sink
from esper.nissa.schema import RunLayout

PROJECT = "esper"  # where neither its settings nor the environment name another
Numbers = Mapping[str, float]


# --- what is told ------------------------------------------------------------------------------


def curves(event: told.Event) -> dict[str, float]:
    """The numbers of an event that are interesting as curves over rounds, or epochs."""
    if isinstance(event, told.UpdateMetrics):
        return {f"update/{name.replace('.', '/')}": v for name, v in event.metrics.items()}
    if isinstance(event, told.EpisodeEnded) and len(event.env):
        names = ("returns", "net_gain", "validation", "added", "interventions", "rolled_back")
        return {f"episode/{name}": float(np.mean(getattr(event, name))) for name in names}
    if isinstance(event, told.Evaluated):
        pairs = zip(event.context, event.score.tolist(), strict=True)
        return {f"evaluation/{event.controller}/{context}": score for context, score in pairs}
    if isinstance(event, told.Sampled):
        return {f"sample/{name}": value for name, value in event.values.items()}
    if isinstance(event, told.Contributed):
        pairs = zip(event.slot, event.contribution.tolist(), strict=True)
        return {f"contribution/{slot}": points for slot, points in pairs}
    if isinstance(event, told.EpochEnded | told.GrowthEnded):
        values = ((name, getattr(event, name)) for name in event.declared)
        return {f"{event.kind}/{name}": float(v) for name, v in values if v is not None}
    return {}


def texts(event: told.Event, layout: RunLayout | None) -> Iterator[tuple[str, str]]:
    """(title, text); stages of slots only where the run is one network, whose names are known."""
    if isinstance(event, told.AnomalyFound):
        yield "anomalies", str(event)
    elif isinstance(event, told.Noted):
        yield "notes", event.text
    elif isinstance(event, told.LifecycleChanged) and layout is not None:
        stages = zip(event.slot, event.before, event.after, event.cause, strict=True)
        yield (
            "lifecycle",
            "; ".join(
                f"{layout.slots[slot]}: {SeedStage(before).name} -> {SeedStage(after).name} "
                f"({cause_name(cause)})"
                for slot, before, after, cause in stages
            ),
        )


# --- trackers ----------------------------------------------------------------------------------


class Tracker:
    """What trackers have in common; each says what it does with settings, numbers and texts."""

    name: ClassVar[str]
    package: ClassVar[Extra]  # the package that must be installed, and the extra that installs it
    _layout: RunLayout | None = None
    _whole: bool = True  # False: of a network that grows, and is not at its end

    def __init__(self, path: Path | None) -> None:
        """Of the run in this folder, or of one that has none."""

    @classmethod
    def require_installed(cls) -> None:
        if find_spec(cls.package) is None:
            raise EsperError(f"{cls.name} is not installed", fix=install_hint(cls.package))

    def write(self, batch: Sequence[told.Event]) -> None:
        for event in batch:
            if isinstance(event, told.RunStarted):
                self._layout = event.layout
                about = {"versions": event.versions, "seeds": event.seeds, "data": event.data}
                self.configure({**event.config, "esper": about})
            if isinstance(event, told.EpochEnded | told.GrowthEnded):
                self._whole = isinstance(event, told.GrowthEnded)
            if numbers := curves(event):
                self.log(numbers, event.round)
            for title, text in texts(event, self._layout):
                self.say(title, text, event.round)
        self.flush()

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Of the run, whatever JSON can hold."""

    def log(self, numbers: Numbers, round: int) -> None: ...
    def say(self, title: str, text: str, round: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class TensorBoardSink(Tracker):
    """A folder of TensorBoard's."""

    name, package = "TensorBoard", "tensorboard"

    def __init__(self, path: str | Path | None, writer: Any = None) -> None:
        """`writer`: something like `torch.utils.tensorboard.SummaryWriter`, in place of one."""
        if path is None:
            fix = "pass out= to the run, or esper.nissa.TensorBoardSink(folder) as the sink"
            raise EsperError("TensorBoard needs a folder", given="a run without one", fix=fix)
        if writer is None:
            self.require_installed()
            writer = import_module("torch.utils.tensorboard").SummaryWriter(path)
        self._writer = writer

    def configure(self, settings: Mapping[str, Any]) -> None:
        self._writer.add_text("settings", f"```\n{json.dumps(settings, indent=1)}\n```", 0)

    def log(self, numbers: Numbers, round: int) -> None:
        for tag, value in numbers.items():
            self._writer.add_scalar(tag, value, round)

    def say(self, title: str, text: str, round: int) -> None:
        self._writer.add_text(title, text, round)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink(Tracker):
    """A run of Weights & Biases; what the environment says (WANDB_MODE, ...) holds."""

    name, package = "Weights & Biases", "wandb"

    def __init__(self, path: Path | None = None, **settings: Any) -> None:
        """`path`: the run's folder; `settings` go to `wandb.init`."""
        self.require_installed()
        wandb = import_module("wandb")
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        usual = {"project": project, "settings": wandb.Settings(console="off", quiet=True)}
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
            usual |= {"dir": str(path), "name": path.resolve().name}
        fix = "wandb login, or set the environment variable WANDB_MODE=offline"
        with in_words(f"{self.name} does not begin", fix=fix):
            self._run = wandb.init(**usual | settings)
        # Steps of its own must rise, and it drops what comes late: a note, or an epoch once more.
        self._run.define_metric("*", step_metric="round")

    def configure(self, settings: Mapping[str, Any]) -> None:
        self._run.config.update(dict(settings), allow_val_change=True)

    def log(self, numbers: Numbers, round: int) -> None:
        self._run.log({**numbers, "round": round})

    def say(self, title: str, text: str, round: int) -> None:
        self._run.log({title: text, "round": round})

    def close(self) -> None:
        self._run.finish(exit_code=0 if self._whole else 1)


class MlflowSink(Tracker):
    """A run of MLflow; where to, the environment says (MLFLOW_TRACKING_URI, ...)."""

    name, package = "MLflow", "mlflow"

    def __init__(
        self, path: Path | None = None, *, uri: str | None = None, experiment: str | None = None
    ) -> None:
        """`path`: the run's folder; `uri`: of the tracking server or store."""
        self.require_installed()
        self._entities = import_module("mlflow.entities")
        self._said: Counter[str] = Counter()  # texts, by the name of their tag
        fix = (
            "set MLFLOW_TRACKING_URI to a server, or install the package mlflow: its file store is "
            "not part of mlflow-skinny"
        )
        with in_words(f"{self.name} does not begin", fix=fix):
            self._client = import_module("mlflow").MlflowClient(uri)
            name = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = self._client.get_experiment_by_name(name)
            place = self._client.create_experiment(name) if found is None else found.experiment_id
            title = None if path is None else path.resolve().name
            self._id = str(self._client.create_run(place, run_name=title).info.run_id)

    def configure(self, settings: Mapping[str, Any]) -> None:
        kind = self._entities.Param
        params = [kind(name, str(value)[:_LONGEST]) for name, value in settings.items()]
        self._client.log_batch(self._id, params=params)

    def log(self, numbers: Numbers, round: int) -> None:
        timestamp = int(1000 * time.time())
        metrics = []
        for name, value in numbers.items():
            key = re.sub(r"[^\w\-. :/]", "_", name)  # the characters that MLflow accepts
            metrics.append(self._entities.Metric(key, value, timestamp, round))
        self._client.log_batch(self._id, metrics=metrics)

    def say(self, title: str, text: str, round: int) -> None:
        key = f"{title}.{round:04d}"
        self._said[key] += 1  # a tag has one value, and a round may have several notes
        key += f".{self._said[key]}" if self._said[key] > 1 else ""
        self._client.set_tag(self._id, key, text[:_LONGEST])

    def close(self) -> None:
        self._client.set_terminated(self._id, "FINISHED" if self._whole else "FAILED")


_LONGEST = 500  # characters of a text that every version and store of MLflow accepts


# --- by name -----------------------------------------------------------------------------------

TRACKERS: dict[str, type[Tracker]] = {
    each.package: each for each in (TensorBoardSink, WandbSink, MlflowSink)
}


def require_sinks(asked: Sequence[Sink | str]) -> None:
    """Refuse a name that there is not, a tracker that is not installed, and what is no sink."""
    for sink in asked:
        if isinstance(sink, str):
            require_known("sink", sink, TRACKERS)
            TRACKERS[sink].require_installed()
        elif not isinstance(getattr(sink, "name", None), str) or not all(
            callable(getattr(sink, method, None)) for method in ("write", "close")
        ):
            raise EsperError(
                "This is no sink",
                given=type(sink).__name__,
                valid=f"an object with name, write(batch) and close(), or {', '.join(TRACKERS)}",
            )


def open_sinks(asked: Sequence[Sink | str], path: Path | None) -> list[Sink]:
    """The sinks that were asked for, of the run in this folder if it has one."""
    require_sinks(asked)
    opened: list[Sink] = []
    with ExitStack() as undone:  # if one cannot begin, those before it are closed again
        for sink in asked:
            if isinstance(sink, str):
                place = path / sink if path is not None and sink == "tensorboard" else path
                sink = TRACKERS[sink](place)
                undone.callback(sink.close)
            opened.append(sink)
        undone.pop_all()
    return opened
