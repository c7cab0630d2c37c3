"""The benchmark of wrapping: its loop by hand does what `grow` does, and its figures have names."""

import copy
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import esper

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def wrapping(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import wrapping

    monkeypatch.setattr(wrapping, "BATCHES", 5)
    monkeypatch.setattr(wrapping, "EPOCHS", 2)
    return wrapping


def test_its_figures_are_named_by_model(
    wrapping: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "figures.json"
    few = ["--models", "mlp", "--steps", "20", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["wrapping.py", *few, "--json", str(file)])
    wrapping.main()
    figures = json.loads(file.read_text())
    assert figures.keys() == {"idle_overhead_mlp", "grow_never_vs_plain_mlp"}
    assert figures["grow_never_vs_plain_mlp"] > 0.0


def test_the_loop_by_hand_trains_and_measures_as_grow_does(wrapping: ModuleType) -> None:
    torch.manual_seed(0)
    model, x = wrapping.mlp()
    train, val = (x, torch.randint(10, (64,))), (x[:24], torch.randint(10, (24,)))
    net = copy.deepcopy(model)
    by_hand = wrapping.train_by_hand(net, train, val, 64)  # one batch: no order
    run = esper.grow(model, train, val, loss="cross_entropy", budget="+50%", epochs=2, lr=1e-3,
                     controller="never", batch_size=64, quiet=True)  # fmt: skip
    for (loss, held_out, score), record in zip(by_hand, run.history, strict=True):
        assert (record["train_loss"], record["val_loss"]) == pytest.approx((loss, held_out), 1e-4)
        assert record["score"] == pytest.approx(score)
