"""TensorBoard: curves of what is interesting as curves."""

import importlib.util
from pathlib import Path

import pytest

from esper.leyline import EsperError
from esper.nissa import (
    AnomalyFound,
    Evaluated,
    Hub,
    Noted,
    Sampled,
    TensorBoardSink,
    UpdateMetrics,
)
from tests.nissa.runs import a_round, ended

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
    with pytest.raises(EsperError, match=r"pip install 'esper-ml\[tensorboard\]'"):
        TensorBoardSink(tmp_path)


@pytest.mark.skipif(not INSTALLED, reason="TensorBoard is not installed")
def test_a_real_writer_leaves_a_file(tmp_path: Path) -> None:
    with Hub(TensorBoardSink(tmp_path)) as hub:
        for event in a_round(1):
            hub.emit(event)
    assert [file.name.startswith("events.out") for file in tmp_path.iterdir()] == [True]
