"""Ways to get it wrong in the first hour, here and on the command line: each says what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy

import esper
from esper.leyline.errors import EsperError
from tests.api.tables import INPUTS, TRAIN, VAL, Script, mlp, train_epoch, wrapped

X, (INPUT, LABEL) = INPUTS[:4], TRAIN
LATE = 10 * (torch.arange(64) == 40)  # in the sixth batch of eight
NUMBER = nn.Sequential(*mlp()[:6], nn.Linear(8, 1))  # one output


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


class Several(nn.Module):
    """Returns more than logits: always, by name, or while it trains."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.how = mlp(), how

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if self.how == "labelled" and labels is None:
            raise TypeError("labels is missing")
        logits = self.body(x)
        if self.how == "by name":
            return {"loss": logits.mean(), "logits": logits}
        return (logits, logits) if self.how == "always" or self.training else logits


class Temperature(nn.Module):
    """A loss that wants to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs * self.scale, targets)


class Endless(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return INPUT[index], LABEL[index]


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class Silent(Script):
    def act(self, *seen: Any) -> Any:
        return None


def spoiled(x: Tensor) -> Tensor:
    return x.masked_fill(torch.arange(x.numel()).view(x.shape) == 7, torch.nan)


def inside(context: Any) -> Any:
    with context:
        return grow()


def in_place() -> nn.Module:
    model = mlp()
    model.compile()
    return model


MORE: dict[str, tuple[Callable[[Path], object], str]] = {
    # models
    "weights for a model": (
        lambda _: grow(mlp().state_dict(), TRAIN, VAL),
        "given: OrderedDict; pass the model itself"),
    "a path for a model": (lambda _: grow("net.pt", TRAIN, VAL), "given: str; pass the model its"),
    "a list for a model": (lambda _: grow([mlp()], TRAIN, VAL), "given: list; pass the model its"),
    "layers without a forward": (
        lambda _: grow(nn.ModuleList(mlp()), TRAIN, VAL), 'missing the required "forward"'),
    "a model that is compiled": (
        lambda _: grow(torch.compile(mlp()), TRAIN, VAL), "compile what comes of it"),
    "a model that compiled itself": (
        lambda _: grow(in_place(), TRAIN, VAL), "compile what comes of it"),
    "a model without values": (
        lambda _: grow(mlp().to("meta"), TRAIN, VAL), "build it on a device that computes"),
    "a model that was never run": (
        lambda _: grow(nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3)), TRAIN, VAL),
        "run the model once on the sample"),
    "a host for a model": (lambda _: grow(wrapped(), TRAIN, VAL), "wrap it once"),
    "a model for several cards": (
        lambda _: grow(nn.DataParallel(mlp()), TRAIN, VAL), "inside the wrapper"),
    "a script for a model": (
        lambda _: grow(torch.jit.script(mlp()), TRAIN, VAL), "the module it was scripted from"),
    "a model that wants labels too": (
        lambda _: grow(Several("labelled"), TRAIN, VAL), "labels is missing; valid: .*keyword arg"),
    "a loader for a sample": (
        lambda _: esper.inspect(mlp(), DataLoader(TensorDataset(X))),
        "not DataLoader; valid: a te"),
    "a batch for a sample": (
        lambda _: esper.wrap(mlp(), (X, LABEL[:4])), "takes 2 positional arg.*valid: a tensor"),
    "no sample": (lambda _: esper.inspect(mlp(), None), "not NoneType; valid: a tensor"),
    # outputs
    "outputs in a tuple": (
        lambda _: grow(Several("always"), TRAIN, VAL), r"cross_entropy\(outputs\[0\], targets\)"),
    "outputs by name": (
        lambda _: grow(Several("by name"), TRAIN, VAL), r"cross_entropy\(outputs\['logits'\], t"),
    "outputs by name for a number": (
        lambda _: grow(Several("by name"), *2 * [(X, X[:, :3])], loss="mse"),
        "given: dict and float32.*check their shapes and types"),
    "more outputs in training": (
        lambda _: grow(Several("in training"), TRAIN, VAL), "given: tuple and int64.*check their"),
    "one output for classes": (
        lambda _: grow(NUMBER, *2 * [(INPUT, LABEL * 0)]),
        "an output for each class, or pass loss="),
    # labels
    "labels as fractions": (
        lambda _: grow(mlp(), (INPUT, LABEL.float()), VAL), r"whole numbers: targets.long\(\)"),
    "labels as yes and no": (
        lambda _: grow(mlp(), (INPUT, LABEL > 0), VAL), r"whole numbers: targets.long\(\)"),
    "one-hot labels": (
        lambda _: grow(mlp(), (INPUT, one_hot(LABEL, 3).float()), VAL), r"targets.argmax\(-1\)"),
    "one-hot whole numbers": (
        lambda _: grow(mlp(), (INPUT, one_hot(LABEL, 3)), VAL), r"targets.argmax\(-1\)"),
    "a column of labels": (
        lambda _: grow(mlp(), (INPUT, LABEL[:, None]), VAL), r"targets.squeeze\(-1\)"),
    "labels that count from one": (
        lambda _: grow(mlp(), (INPUT, LABEL + 1), VAL),
        "labels from 1 to 3; valid: 0 to 2; .*from 0"),
    "labels below nothing": (
        lambda _: grow(mlp(), (INPUT, LABEL - 1), VAL), "labels from -1 to 1; valid: 0 to 2"),
    "other labels in val": (
        lambda _: grow(mlp(), TRAIN, (VAL[0], VAL[1] + 3)),
        "given: labels from 3 to 5; label [345] of 3 classes in sample 0 of val; valid: 0 to"),
    "labels that only turn up later": (
        lambda _: grow(mlp(), DataLoader(TensorDataset(INPUT, LABEL + LATE), 8), VAL),
        "Target 1[012] is out of bounds.*check their shapes and types"),
    "words for labels": (
        lambda _: grow(mlp(), (INPUT.numpy(), np.array(["cat"] * 64)), VAL), "pair of tensors"),
    "a list of labels": (
        lambda _: grow(mlp(), (INPUT, LABEL.tolist()), VAL), "Tensor, list; valid: .*pair of tens"),
    # data
    "no validation data": (lambda _: grow(mlp(), TRAIN, None), "hold out part of train"),
    "no training data": (lambda _: grow(mlp(), None, VAL), "given: NoneType; valid: a DataLoader"),
    "inputs of two kinds of fraction": (
        lambda _: grow(mlp(), (INPUT.double().numpy(), LABEL.numpy()), VAL), r"inputs.float\(\)"),
    "inputs of whole numbers": (
        lambda _: grow(mlp(), (INPUT.long(), LABEL), VAL), r"inputs.float\(\)"),
    "inputs that are no numbers": (
        lambda _: grow(mlp(), (spoiled(INPUT), LABEL), VAL),
        "nan on the train data; NaN or infinity in sample 1 of train; look for NaN"),
    "validation inputs that are no numbers": (
        lambda _: grow(mlp(), TRAIN, (spoiled(VAL[0]), VAL[1])),
        "nan on the val data; NaN or infinity in sample 1 of val; look for NaN"),
    "targets that are no numbers": (
        lambda _: grow(NUMBER, (INPUT, spoiled(INPUT)[:, 1:2]), (X, X[:, :1]), loss="mse"),
        "on the train data; NaN or infinity in sample 1 of train; look for NaN in inputs"),
    "numbers that go missing later": (
        lambda _: grow(mlp(), (spoiled(INPUT), LABEL), VAL, batch_size=4, seed=2),
        "look for NaN in"),
    "narrower inputs in val": (
        lambda _: grow(mlp(), TRAIN, (VAL[0][:, :5], VAL[1])), "fails on the val data; .*give val"),
    "narrower inputs in test": (
        lambda _: grow(test=(VAL[0][:, :5], VAL[1])), "fails on the test data; .*give test the"),
    "a path for data": (
        lambda _: grow(mlp(), Path("a.csv"), VAL), "PosixPath; valid: a DataLoader"),
    "a dict of data": (
        lambda _: grow(mlp(), {"x": INPUT, "y": LABEL}, VAL), "given: dict; valid: a DataLoader"),
    "a generator for data": (
        lambda _: grow(mlp(), (pair for pair in [TRAIN]), VAL), "given: generator; valid: a Data"),
    "a list of pairs": (
        lambda _: grow(mlp(), list(zip(INPUT, LABEL, strict=True)), VAL), "tuple; valid: a DataL"),
    "a class for data": (lambda _: grow(mlp(), TensorDataset, VAL), "given: type; valid: a DataLo"),
    "data without a length": (lambda _: grow(mlp(), Endless(), VAL), "write its __len__"),
    "a loader of dicts": (
        lambda _: grow(mlp(), DataLoader([{"x": 1, "y": 2}]), VAL), "given: dict; .*a collate_fn"),
    "a loader of three": (
        lambda _: grow(mlp(), DataLoader(TensorDataset(INPUT, LABEL, LABEL)), VAL), "collate_fn"),
    "a loader that drops its only batch": (
        lambda _: grow(mlp(), DataLoader(TensorDataset(X, X), 8, drop_last=True), VAL),
        "left out by drop_last"),
    "a stream of nothing": (
        lambda _: grow(mlp(), DataLoader(Nothing()), VAL), "at least one batch"),
    "batches of one": (lambda _: grow(batch_size=1), "make batch_size larger, or the loader with"),
    "a loader whose last batch is one": (
        lambda _: grow(mlp(), DataLoader(TensorDataset(INPUT[:5], LABEL[:5]), 4), VAL),
        "the loader with drop_last=True"),
    # losses
    "a loss that is a class with arguments": (
        lambda _: grow(loss=Script), r"without arguments; .*loss=Script\(...\)"),
    "a loss that was called already": (
        lambda _: grow(loss=cross_entropy(X, LABEL[:4])),
        r"given: 'float32 .*loss\(outputs, target"),
    "no loss": (lambda _: grow(loss=None), "valid: cross_entropy, mse, l1; or any function loss"),
    "a loss that returns nothing": (
        lambda _: grow(loss=lambda outputs, targets: None), "given: NoneType; return it"),
    "a loss as a plain number": (
        lambda _: grow(loss=lambda o, t: cross_entropy(o, t).item()), r"without item\(\)"),
    "a loss of nobody's parameters": (
        lambda _: grow(loss=lambda o, t: cross_entropy(o.detach(), t)), r"without argmax, detach"),
    "a loss of one thing": (
        lambda _: grow(loss=lambda outputs: outputs.mean()),
        "is a function of outputs and targets"),
    "a loss of targets and outputs": (
        lambda _: grow(loss=lambda t, o: cross_entropy(o.float(), t)),
        "a function of outputs and t"),
    "a loss that fails": (
        lambda _: grow(loss=lambda o, t: 1 / 0),
        "division by zero; .*check their shapes and types"),
    "a loss that learns": (
        lambda _: grow(loss=Temperature()), "make them part of the model, or fr"),
    "a loss below nothing": (
        lambda _: grow(mlp(), *2 * [(X, X[:, :3])], loss=lambda o, t: -mse_loss(o, t)),
        "never negative.*metric of your own"),
    "a loss of labels for classes": (
        lambda _: grow(loss=nn.BCEWithLogitsLoss),
        "must be the same as input size.*check their sha"),
    # metrics
    "a metric for each sample": (
        lambda _: grow(metric=lambda o, t: (o.argmax(1) == t).float()),
        "take the mean over classes"),
    "a metric of nothing": (
        lambda _: grow(metric=lambda o, t: None), "given: NoneType; take the me"),
    "a metric in words": (
        lambda _: grow(metric=lambda o, t: "good"), "must return one number; giv"),
    "a metric that fails": (
        lambda _: grow(metric=lambda o, t: 1 / 0), "division by zero; pass a function of outputs"),
    "a metric of one thing": (
        lambda _: grow(metric=lambda outputs: 50.0),
        "takes 1 positional .*pass a function of outp"),
    "a metric above a hundred": (
        lambda _: grow(metric=lambda o, t: 250.0), "valid: at most 100; .*leave metric away"),
    "a metric that is no number": (
        lambda _: grow(metric=lambda o, t: float("nan")), "The metric is not a finite number"),
    "a number for a metric": (lambda _: grow(metric=0.5), r"metric\(outputs, targets\), a m"),
    "a metric's class that needs classes": (
        lambda _: grow(metric=MulticlassAccuracy), r"metric=MulticlassAccuracy\(...\)"),
    "a metric of each class": (
        lambda _: grow(metric=MulticlassAccuracy(3, average=None)),
        "float32 .3.; take the mean over"),
    "a metric of other classes": (
        lambda _: grow(metric=MulticlassAccuracy(2)),
        "equal to number of classes.*pass a function"),
    "a metric of yes and no": (
        lambda _: grow(metric=BinaryAccuracy()), "to have the same shape.*pass a function of out"),
    "a metric of which less is better": (
        lambda _: grow(metric=MeanSquaredError()),
        "lower is better.*turn it round, or leave metric"),
    "several metrics": (
        lambda _: grow(metric=MetricCollection([MulticlassAccuracy(3)])),
        "one number; given: dict"),
    # settings
    "an optimiser with old parameters": (
        lambda _: grow(optimizer=torch.optim.SGD(mlp().parameters(), lr=0.1)),
        "pass its class: optimizer=torch.optim.SGD, lr="),
    "an optimiser that asks again": (lambda _: grow(optimizer="LBFGS"), "such as SGD or AdamW"),
    "an optimiser of sparse gradients": (
        lambda _: grow(optimizer=torch.optim.SparseAdam), "such as SGD or AdamW"),
    "no optimiser": (lambda _: grow(optimizer=None), "pass the class and its settings"),
    "a function that makes no optimiser": (
        lambda _: grow(optimizer=lambda params, lr: None), "a class such as torch.optim.AdamW"),
    "a decay that grows": (lambda _: grow(weight_decay=-0.1), "'weight_decay' is out of range"),
    "a decay for one without": (
        lambda _: grow(optimizer="Rprop", weight_decay=0.1),
        "unexpected keyword argument 'weight_"),
    "a rate below nothing": (lambda _: grow(lr=-1), "given: -1; valid: a number above 0"),
    "a rate in words": (lambda _: grow(lr="1e-3"), "given: '1e-3'; valid: a number above 0"),
    "a rate that is far too large": (
        lambda _: grow(optimizer="SGD", lr=1e30), "start again with a smaller learning rate"),
    "another half precision": (lambda _: grow(precision="fp16"), "valid: full, bf16"),
    "a type for a precision": (lambda _: grow(precision=torch.bfloat16), "valid: full, bf16"),
    "a card that is not there": (
        lambda _: grow(device="cuda:77"), 'valid: such as "cpu", "cuda".*or "auto"'),
    "a list of devices": (
        lambda _: grow(device=["cpu"]), "list.*; valid: such as"),  # torch words it
    "no gradients": (lambda _: inside(torch.no_grad()), "call it outside"),
    "inference alone": (lambda _: inside(torch.inference_mode()), "call it outside"),
    "an autocast around it": (
        lambda _: inside(torch.autocast("cpu", torch.bfloat16)), "pass precision='bf16'"),
    "epochs in words": (lambda _: grow(epochs="10"), "given: '10'; valid: a whole number from 1"),
    "a budget in words": (lambda _: grow(budget="15 percent"), r"valid: .\+15%. of the model"),
    "an endless budget": (lambda _: grow(budget=float("inf")), "or None for no limit"),
    "a seed in words": (lambda _: grow(seed="a"), "given: 'a'; valid: a whole number from 0"),
    "a scheduler by name": (lambda _: grow(scheduler="cosine"), "as in scheduler=lambda optimizer"),
    "a scheduler of nothing": (
        lambda _: grow(scheduler=lambda optimizer: None),
        "NoneType is no scheduler; pass a function"),
    "a number to call": (lambda _: grow(on_epoch=3), "pass a function of the record"),
    # slots and blueprints
    "a number for a slot": (lambda _: grow(slots=[2]), r"write slots=\['layer1'\] or .*inspect"),
    "a layer for a slot": (lambda _: grow(slots=[mlp()[2]]), "given: .ReLU.*esper.inspect shows"),
    "one number for slots": (lambda _: grow(slots=3), r"given: 3; valid: .*write slots="),
    "slots that are none": (lambda _: grow(slots=None), 'or slots="auto"'),
    "a blueprint and no list": (lambda _: grow(blueprints="mlp"), r"write blueprints=\['mlp'\]"),
    "a blueprint and no list in wrap": (
        lambda _: esper.wrap(mlp(), X, blueprints="mlp"), r"write blueprints=\['mlp'\]"),
    "a blueprint of other places": (lambda _: grow(blueprints=["conv"]), "valid: norm, gate, lowr"),
    # controllers
    "a class for a controller": (lambda _: grow(controller=Script), "given: Script; valid: a name"),
    "nobody for a controller": (lambda _: grow(controller=None), "given: NoneType; valid: a name"),
    "a controller that says nothing": (
        lambda _: grow(controller=Silent({})), r"return Actions.of\(legality.space, op="),
    "a controller for other hosts": (
        lambda _: grow(controller="specialist"),
        "given: 2 slots with the blueprints norm, gate, lowrank.*valid: 3 slots with the "
        "blueprints norm, squeeze.*name 3 places in .*, or use 'heuristic'"),
    # folders
    "an origin that no file can hold": (
        lambda _: grow(origin={"a": object()}), "valid: numbers, texts, lists and dicts"),
    "a folder inside a file": (
        lambda folder: grow(out=_file(folder / "file") / "run"),
        "name a directory that can be made"),
    "a folder with a run in it": (
        lambda folder: grow(out=saved(folder)), "go on with esper.resume"),
    "a file of a run": (
        lambda folder: esper.resume(saved(folder) / "checkpoint"),
        r"that grow\(out=...\) was given"),
    "a class to go on with": (
        lambda folder: esper.resume(saved(folder), nn.Sequential, TRAIN, VAL),
        "make an instance of"),
    "inputs to go on with": (
        lambda folder: esper.resume(saved(folder), mlp(), INPUT, VAL),
        "given: Tensor; valid: a Dat"),
    "data the other way round": (
        lambda folder: esper.resume(saved(folder), mlp(), VAL, TRAIN), "in the same order"),
    "another optimiser to go on with": (
        lambda folder: esper.resume(saved(folder), mlp(), TRAIN, VAL, optimizer="SGD"),
        r"given: \['SGD'\]; valid: \['AdamW'\]; make"),
    "another controller to go on with": (
        lambda folder: esper.resume(saved(folder), mlp(), TRAIN, VAL, controller="plateau"),
        "go on with the one that it began with"),
}  # fmt: skip


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    # models and samples
    "a class for a model": (lambda _: esper.inspect(nn.Linear, X), "make an instance of it first"),
    "a function for a model": (lambda _: esper.wrap(torch.relu, X), "pass the model itself"),
    "no parameters": (lambda _: esper.wrap(nn.ReLU(), X), "nothing to grow; .*that is trained"),
    "a sample of the wrong shape": (
        lambda _: esper.wrap(mlp(), torch.randn(4, 9)), "fails on the sample.*valid: a tensor"),
    "a compiled model": (
        lambda _: esper.wrap(torch.compile(mlp()), X), "compile what comes of it"),
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
        lambda folder: grow(controller=folder / "nobody"), "or the directory of a"),
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
        "build the model.* as it was"),
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


assert not WRONG.keys() & MORE.keys()
WRONG |= MORE


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_mistake_is_told_in_one_sentence_that_says_what_to_do(case: str, tmp_path: Path) -> None:
    mistake, advice = WRONG[case]
    with pytest.raises(EsperError, match=advice) as caught:
        mistake(tmp_path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith((".", "?"))


def test_there_are_enough_of_them() -> None:
    assert len(WRONG) >= 80
