"""Trackers: curves of what is interesting as curves, the settings, and what happened as texts."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from esper.leyline import Cause, EsperError, SeedStage
from esper.nissa import (
    AnomalyFound,
    Contributed,
    EpochEnded,
    Evaluated,
    Event,
    GrowthEnded,
    Hub,
    LifecycleChanged,
    MlflowSink,
    Noted,
    RunStarted,
    Sampled,
    TensorBoardSink,
    UpdateMetrics,
    WandbSink,
    open_sinks,
    require_sinks,
    trackers,
)
from tests.nissa.runs import LAYOUT, a_round, ended

INSTALLED = importlib.util.find_spec("tensorboard") is not None


class FakeWriter:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str, int]] = []
        self.flushed = self.closed = 0

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        self.texts.append((tag, text_string, global_step))

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed += 1


def test_curves_and_texts_are_written_over_rounds(tmp_path: Path) -> None:
    writer = FakeWriter()
    with Hub(TensorBoardSink(tmp_path, writer)) as hub:
        hub.emit(UpdateMetrics(round=3, metrics={"heads.op.entropy": 0.5}))
        hub.emit(Evaluated(round=3, controller="tamiyo", context=["gain", "all"], score=[1.0, 2.0]))
        hub.emit(Sampled(round=4, values={"train_seconds": 0.25}))
        hub.emit(ended(4))
        hub.emit(Noted(round=4, text="hello"))
        hub.emit(
            AnomalyFound(
                round=4, name="not_a_number", head="", raised=True, seen=1.0, threshold=0.0,
                updates=1, message="Seen.", advice="Do.",
            )
        )  # fmt: skip
    assert writer.scalars[:4] == [
        ("update/heads/op/entropy", 0.5, 3),
        ("evaluation/tamiyo/gain", 1.0, 3),
        ("evaluation/tamiyo/all", 2.0, 3),
        ("sample/train_seconds", 0.25, 4),
    ]
    assert ("episode/returns", pytest.approx(ended(4).returns.mean()), 4) in writer.scalars
    assert writer.texts == [("notes", "hello", 4), ("anomalies", "Seen. Do.", 4)]
    assert writer.flushed >= 1
    assert writer.closed == 1


@pytest.mark.skipif(INSTALLED, reason="TensorBoard is installed")
def test_without_the_package_the_command_that_installs_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(EsperError, match=r"pip install '\.\[tensorboard\]'"):
        TensorBoardSink(tmp_path)


@pytest.mark.skipif(not INSTALLED, reason="TensorBoard is not installed")
def test_a_real_writer_leaves_a_file(tmp_path: Path) -> None:
    with Hub(TensorBoardSink(tmp_path)) as hub:
        for event in a_round(1):
            hub.emit(event)
    assert [file.name.startswith("events.out") for file in tmp_path.iterdir()] == [True]


# --- a network that grows -------------------------------------------------------------------------


def growth(*epochs: int) -> list[Event]:
    """What a network that grows tells; it starts, or goes on, before the first of these epochs."""
    config = {"lr": 0.01, "budget": {"params": "+15%"}, "slots": ["2"]}
    start = RunStarted(
        round=epochs[0] - 1, config=config, versions={"torch": "2"}, seeds={"run": 7}, layout=LAYOUT
    )
    told: list[Event] = [start]
    for epoch in epochs:
        told += [
            EpochEnded(round=epoch, train_loss=1.5, val_loss=1.25, score=50.25 + epoch, added=64),
            Contributed(round=epoch, slot=["a@0"], blueprint=["mlp"], contribution=[epoch / 4]),
            LifecycleChanged(round=epoch, step=0, env=[0], slot=[1], cause=[Cause.TIME],
                             before=[SeedStage.TRAINING], after=[SeedStage.BLENDING]),
        ]  # fmt: skip
    return told


def tell(sink: Any, *events: Event) -> None:
    with Hub(sink) as hub:
        for event in events:
            hub.emit(event)
    assert all(channel.alive for channel in hub._channels), "none has failed"


# Of a round that was not finished, and then two of the one before it.
LATE = [Noted(round=r, text=t) for r, t in ((3, "diverged"), (2, "slow"), (2, "slower"))]
END = GrowthEnded(round=4, loss=1.0, score=54.0, added=64)
CHANGE = f"{LAYOUT.slots[1]}: TRAINING -> BLENDING (TIME)"


def test_tensorboard_has_the_curves_of_a_network_that_grows(tmp_path: Path) -> None:
    writer = FakeWriter()
    tell(TensorBoardSink(tmp_path, writer), *growth(1, 2))
    assert ("epoch/score", 52.25, 2) in writer.scalars
    assert ("contribution/a@0", 0.5, 2) in writer.scalars
    assert not [tag for tag, _, _ in writer.scalars if tag == "epoch/committed"]  # not measured
    (title, settings, _), *texts = writer.texts
    assert title == "settings"
    assert json.loads(settings.strip("`\n"))["lr"] == 0.01
    assert texts == [("lifecycle", CHANGE, 1), ("lifecycle", CHANGE, 2)]


def test_stages_of_a_training_run_are_left_to_the_store() -> None:
    writer = FakeWriter()
    tell(TensorBoardSink("", writer), *a_round(1))
    assert not [title for title, _, _ in writer.texts if title == "lifecycle"]


# --- the real packages, without a network -------------------------------------------------------


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path


def test_mlflow_has_settings_curves_and_changes(offline: Path) -> None:
    from mlflow import MlflowClient

    run = offline / "net-1"
    client = MlflowClient()

    def stored(status: str) -> Any:
        experiment = client.get_experiment_by_name("esper")
        found = client.search_runs([experiment.experiment_id])
        return next(each for each in found if each.info.status == status)

    tell(*open_sinks(["mlflow"], run), *growth(1, 2))
    assert stored("FAILED").info.run_name == "net-1"  # interrupted
    tell(*open_sinks(["mlflow"], run), *growth(3, 4), *LATE, END)
    found = stored("FINISHED")
    assert found.info.run_name == "net-1"
    assert found.data.params["lr"] == "0.01"
    assert "+15%" in found.data.params["budget"]
    assert "'run': 7" in found.data.params["esper"]
    curve = client.get_metric_history(found.info.run_id, "epoch/score")
    assert [(each.step, each.value) for each in curve] == [(n, 50.25 + n) for n in (3, 4)]
    assert found.data.metrics["contribution/a_0"] == 1.0  # @ is not in MLflow's alphabet
    assert found.data.tags["lifecycle.0004"] == CHANGE
    assert [found.data.tags[f"notes.{n}"] for n in ("0002", "0002.2")] == ["slow", "slower"]


def test_what_keeps_mlflow_from_beginning_is_said(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    with pytest.raises(EsperError, match=r"MLflow does not begin.*set MLFLOW_TRACKING_URI"):
        MlflowSink(offline)


def test_weights_and_biases_has_settings_curves_and_changes(offline: Path) -> None:
    import wandb

    run = offline / "net-1"
    tell(WandbSink(run, name="mine"), *growth(1, 2), *LATE)
    wandb.teardown()  # waits for the process that writes
    (written,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    told = written.read_bytes()
    for word in (b"epoch/score", b"51.25", b"contribution/a@0", b"+15%", CHANGE.encode(), b"mine"):
        assert word in told
    assert all(note.text.encode() in told for note in LATE)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_names_the_command(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(EsperError, match=rf"pip install '\.\[{name}\]'"):
        require_sinks([name])


def test_what_was_opened_is_closed_again_where_another_cannot_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []

    class Opened(trackers.Tracker):
        def close(self) -> None:
            closed.append("opened")

    class Refused(trackers.Tracker):
        def __init__(self, path: Path | None) -> None:
            raise EsperError("Refused does not begin")

    for kind in (Opened, Refused):
        monkeypatch.setattr(kind, "require_installed", lambda: None)
    monkeypatch.setattr(trackers, "TRACKERS", {"opened": Opened, "refused": Refused})
    with pytest.raises(EsperError, match="Refused does not begin"):
        open_sinks(["opened", "refused"], None)
    assert closed == ["opened"]


def test_tensorboard_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda package: package)
    with pytest.raises(EsperError, match="pass out="):
        open_sinks(["tensorboard"], None)
