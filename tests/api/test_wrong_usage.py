"""Forty ways to get it wrong are split between here and the command line: each says what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.leyline.errors import EsperError
from tests.api.tables import INPUTS, TRAIN, VAL, Script, mlp, train_epoch, wrapped

X = INPUTS[:4]


def grow(*given: Any, **options: Any) -> Any:
    model, train, val = given or (mlp(), TRAIN, VAL)
    usual = {"loss": "cross_entropy", "budget": "+100%", "epochs": 6, "controller": "never"}
    return esper.grow(model, train, val, **{**usual, **options})


def ticked(**options: Any) -> Any:
    host = wrapped()
    train_epoch(host, host.optimizer(torch.optim.SGD, lr=0.1))
    return host.tick(**{"controller": "never", "train_loss": 1.0, "val_score": 50.0, **options})


def saved(path: Path, **options: Any) -> Path:
    """A run that was interrupted after its second epoch."""

    def interrupt(record: dict[str, Any]) -> None:
        if record["epoch"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grow(out=path / "run", on_epoch=interrupt, **options)
    return path / "run"


class Extra(nn.Sequential):
    def get_extra_state(self) -> object:
        return {"not": "a tensor"}

    def set_extra_state(self, state: object) -> None:
        pass


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    # models and samples
    "a class for a model": (lambda _: esper.inspect(nn.Linear, X), "make an instance of it first"),
    "a function for a model": (lambda _: esper.wrap(torch.relu, X), "pass the model itself"),
    "no parameters": (lambda _: esper.wrap(nn.ReLU(), X), "nothing to grow; .*that is trained"),
    "a sample of the wrong shape": (
        lambda _: esper.wrap(mlp(), torch.randn(4, 9)), "fails on the sample.*valid: a tensor"),
    "a compiled model": (
        lambda _: esper.wrap(torch.compile(mlp()), X), "attach slots first, then torch.compile"),
    "wrapped twice": (lambda _: esper.wrap(wrapped(), X), "wrap it once"),
    # slots
    "a path with a typo": (lambda _: esper.wrap(mlp(), X, slots=["22"]), "valid: .*2"),
    "a path and no list": (lambda _: esper.wrap(mlp(), X, slots="2"), r"write slots=\['2'\]"),
    "no slots": (lambda _: esper.wrap(mlp(), X, slots=[]), 'slots="auto"'),
    "the same slot twice": (lambda _: esper.wrap(mlp(), X, slots=["2", "2"]), "keep one of the"),
    "an unknown blueprint": (
        lambda _: esper.wrap(mlp(), X, blueprints=["mpl"]), "did you mean 'mlp'"),
    "an unknown isolation": (
        lambda _: esper.wrap(mlp(), X, isolation="dual-pass"), "did you mean 'dual_pass'"),
    # budgets
    "a fraction for a budget": (lambda _: grow(budget=0.15), r"write '\+15%'"),
    "a negative budget": (lambda _: grow(budget=-3), "valid: .*15%"),
    "a budget without room": (lambda _: grow(budget=3), "no room for any seed.*allow more"),
    "no epochs": (lambda _: grow(epochs=0), "whole number from 1"),
    "two numbers of epochs": (
        lambda _: grow(budget=esper.Budget("+50%", epochs=5)), "give them once"),
    # data, losses, metrics
    "data that are no data": (lambda _: grow(mlp(), "digits", VAL), "valid: a DataLoader"),
    "inputs without targets": (lambda _: grow(mlp(), (TRAIN[0],), VAL), "pair of tensors"),
    "too few targets": (
        lambda _: grow(mlp(), (TRAIN[0], TRAIN[1][:9]), VAL), "64 inputs, 9 targets"),
    "no samples": (lambda _: grow(mlp(), TRAIN, (X[:0], TRAIN[1][:0])), "at least one sample"),
    "a loader of single tensors": (
        lambda _: grow(mlp(), DataLoader(TensorDataset(X)), VAL), "collate_fn"),
    "an unknown loss": (lambda _: grow(loss="crossentropy"), "did you mean 'cross_entropy'"),
    "a loss that is a number": (lambda _: grow(loss=3), r"loss\(outputs, targets\)"),
    "a loss that does not fit": (lambda _: grow(loss="mse"), "targets' shape and type"),
    "a loss for each sample": (
        lambda _: grow(loss=nn.CrossEntropyLoss(reduction="none")), "take the mean over the batch"),
    "an unknown metric": (lambda _: grow(metric="acuracy"), "did you mean 'accuracy'"),
    "accuracy without classes": (
        lambda _: grow(mlp(), (X, X[:, :3]), (X, X[:, :3]), loss="mse", metric="accuracy"),
        "choose metric='loss'"),
    "a column of outputs for a row of targets": (
        lambda _: grow(nn.Sequential(*mlp()[:6], nn.Linear(8, 1)), (X, X[:, 0]), (X, X[:, 0]),
                       loss="mse"), r"targets\[:, None\] for targets"),
    "as many positions as classes": (
        lambda _: grow(nn.Sequential(nn.Conv1d(1, 6, 1), nn.ReLU(), nn.Conv1d(6, 6, 1)), *2 * [
            (X[:, None], torch.ones(4, 6).long())]),
        "second axis or the last.*loss=torch.nn.functional.cross_entropy"),
    # settings
    "a device by another name": (lambda _: grow(device="gpu"), 'valid: such as "cpu", "cuda"'),
    "a scheduler without its settings": (
        lambda _: grow(scheduler=torch.optim.lr_scheduler.StepLR), "StepLR.*step_size.*as in sche"),
    "a scheduler that is made already": (
        lambda _: grow(scheduler=torch.optim.lr_scheduler.StepLR(torch.optim.SGD([X], lr=0.1), 1)),
        "pass a function of the optimiser"),
    "an unknown optimiser": (lambda _: grow(optimizer="adamv"), "did you mean 'AdamW'|valid: "),
    "a learning rate of nothing": (
        lambda _: grow(lr=0.0), "'lr' is out of range; given: 0.0; valid: a number above 0"),
    "half a batch": (lambda _: grow(batch_size=0.5), "whole number from 1"),
    "an optimiser's wrong setting": (
        lambda _: wrapped().optimizer(torch.optim.SGD, lr=0.1, momentun=0.9), "host.optimizer"),
    "an optimiser that is made already": (
        lambda _: wrapped().optimizer(torch.optim.SGD(mlp().parameters(), lr=0.1)),
        "pass the class"),
    "another model's optimiser": (
        lambda _: wrapped().track(torch.optim.SGD(mlp().parameters(), lr=0.1)),
        "from this model's parameters"),
    "a scheduler for an optimiser": (lambda _: wrapped().track(object()), "the optimiser itself"),
    # controllers
    "a controller with a typo": (
        lambda _: grow(controller="heuristc"), "did you mean 'heuristic'"),
    "a controller's unknown setting": (
        lambda _: grow(controller="heuristic:patience=2,delt=1"), "did you mean 'delta'"),
    "a place that is not there": (
        lambda _: grow(controller="plateau:places=9/mlp", slots=["2"]), "Unknown slot"),
    "a schedule that comes too late": (
        lambda _: grow(controller="fixed:slot=2,blueprint=mlp,epoch=9", slots=["2"]),
        "valid: epochs 0 to"),
    "too few epochs to grow": (
        lambda _: grow(controller="heuristic", epochs=2),
        "given: epoch 2 of 2; train for at least 6 epochs"),
    "a path without a controller": (
        lambda folder: grow(controller=folder / "nobody"), "no trained controller at this path"),
    "a folder without a controller": (lambda folder: grow(controller=folder), "not an archive"),
    "an object that is no controller": (lambda _: ticked(controller=42), "an object with act"),
    # ticks
    "a loss that diverged": (lambda _: ticked(train_loss=float("nan")), "smaller learning rate"),
    "a score for each sample": (lambda _: ticked(val_score=torch.ones(3)), "a tensor that holds"),
    "a perplexity for a score": (lambda _: ticked(val_score=250.0), "higher is better.*at most 10"),
    "no score": (lambda _: ticked(val_score=None), "pass one"),
    "a judge without evidence": (lambda _: ticked(controller="heuristic"), "pass evaluate="),
    "a seed step in straight-through": (
        lambda _: wrapped().seed_step(lambda: torch.zeros(())), "wrap with isolation='dual_pass'"),
    # folders
    "nothing to resume": (lambda folder: esper.resume(folder), r"grow\(out=...\) was given"),
    "no such run": (lambda folder: esper.resume(folder / "no"), "no such directory"),
    "a run without its model": (
        lambda folder: esper.resume(saved(folder)), "build it as for the run"),
    "a run without its data": (
        lambda folder: esper.resume(saved(folder), mlp()), "pass train, val to resume"),
    "a run with other data": (
        lambda folder: esper.resume(saved(folder), mlp(), VAL, VAL), "load the same data"),
    "a run with another model": (
        lambda folder: esper.resume(saved(folder, slots=["2"]), nn.Sequential(
            nn.Linear(6, 8), nn.ReLU(), nn.ReLU(), nn.Linear(8, 3)), TRAIN, VAL),
        "build the model as it was"),
    "a run with another loss": (
        lambda folder: esper.resume(
            saved(folder, loss=lambda a, b: nn.functional.cross_entropy(a, b)), mlp(), TRAIN, VAL),
        "loss was a function .*pass it again"),
    "a run without its controller": (
        lambda folder: esper.resume(
            saved(folder, controller=Script({}), slots=["2"]), mlp(), TRAIN, VAL
        ),
        "controller was a function or an object.*controller=",
    ),
    "a file for a folder": (
        lambda folder: grow(out=_file(folder / "file")), "name a directory"),
    "a state that is no tensor": (
        lambda folder: grow(Extra(*mlp()), TRAIN, VAL, out=folder / "run"), "return tensors"),
    "a host loaded from a run": (
        lambda folder: wrapped().load(saved(folder) / "checkpoint"), "holds something else"),
}  # fmt: skip


def _file(path: Path) -> Path:
    path.write_text("")
    return path


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_told_in_one_sentence_that_says_what_to_do(case: str, tmp_path: Path) -> None:
    mistake, advice = WRONG[case]
    with pytest.raises(EsperError, match=advice) as caught:
        mistake(tmp_path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith((".", "?"))


def test_there_are_enough_of_them() -> None:
    assert len(WRONG) >= 25
