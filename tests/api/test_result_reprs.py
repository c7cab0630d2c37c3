"""The repr of every result that Esper returns: one line of at most 100 characters."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

import esper
from esper.api import GrownRun, read_report
from tests.api.tables import INPUTS, TRAIN, VAL, Script, mlp, train_epoch, wrapped

MAX_WIDTH = 100


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> GrownRun:
    return esper.grow(
        mlp(), TRAIN, VAL, loss="cross_entropy", budget=esper.Budget("+120%", 6), slots=["2"],
        controller="fixed:slot=2,blueprint=mlp,epoch=1", batch_size=16, quiet=True,
        out=tmp_path_factory.mktemp("runs") / "run",
    )  # fmt: skip


def results_inside(value: object) -> list[Any]:
    """A result and all results that it holds."""
    if isinstance(value, (list, tuple)):
        return [result for item in value for result in results_inside(item)]
    if isinstance(value, dict):
        return results_inside(list(value.values()))
    if not is_dataclass(value):
        return []
    inner = [] if isinstance(value, GrownRun) else [getattr(value, f.name) for f in fields(value)]
    return [value, *results_inside(inner)]


def ticks() -> list[Any]:
    host = wrapped()
    optimizer = host.optimizer(torch.optim.SGD, lr=0.1)
    script = Script({1: ("plant", "2", "mlp", "ramp")})
    decided = []
    for _ in range(3):
        loss = train_epoch(host, optimizer)
        decided.append(host.tick(script, train_loss=loss, val_score=50.0))
    return decided


RESULTS: dict[str, Callable[[GrownRun], Any]] = {
    "GrownRun": lambda run: run,
    "Retrained": lambda run: run.retrain(),
    "Report": lambda run: [run.report(), read_report(run.folder.path)],  # type: ignore[union-attr]
    "SeedLife": lambda run: run.seeds,
    "Inspection": lambda run: esper.inspect(mlp(), INPUTS[:5], budget="+50%"),
    "Audit": lambda run: esper.audit(
        mlp(), TRAIN, VAL, loss="cross_entropy", budget="+120%", slots=["2"], epochs=1, quiet=True
    ),
    "Tick": lambda run: ticks(),
    "Transitions": lambda run: wrapped().germinate("2", "mlp"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_repr_of_result_fits_one_line(name: str, run: GrownRun) -> None:
    results = results_inside(RESULTS[name](run))
    assert name in {type(result).__name__ for result in results}
    for result in results:
        assert "\n" not in repr(result)
        assert len(repr(result)) <= MAX_WIDTH, repr(result)
        assert type(result).__name__ in repr(result)
