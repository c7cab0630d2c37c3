"""Small models, small data, and a controller that follows a script, for the tests of the API."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from esper.api import GrowingModel, wrap
from esper.api.grown_runs import CHECKPOINT, KIND, VERSION
from esper.archive import read_archive, write_archive
from esper.kasmina.gates import GateRules
from esper.leyline.legality import Actions, Legality
from esper.leyline.ops import Blend, LifecycleOp
from esper.leyline.signals import Signals

FEATURES, CLASSES = 6, 3
_DRAW = torch.Generator().manual_seed(5)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_DRAW)


INPUTS = draw(96, FEATURES)
LABELS = (INPUTS[:, 0] * INPUTS[:, 1] > 0).long() + (INPUTS[:, 2] > 0).long()
TRAIN = INPUTS[:64], LABELS[:64]
VAL = INPUTS[64:], LABELS[64:]


def mlp(start: int = 1) -> nn.Sequential:
    """With dropout, so that random streams count."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start)
        return nn.Sequential(
            nn.Linear(FEATURES, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(8, 8),
            nn.ReLU(),
            nn.Linear(8, CLASSES),
        )


def wrapped(**options: Any) -> GrowingModel:
    """With two slots whose gates ask for no measurements, unless told otherwise."""
    usual = {"slots": ["2", "5"], "rules": GateRules.unmeasured()}
    return wrap(mlp(), INPUTS[:5], **{**usual, **options})


def accuracy(model: nn.Module) -> float:
    return 100.0 * float((model(VAL[0]).argmax(1) == VAL[1]).double().mean())


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, size: int = 16) -> float:
    """The loop that everyone has; isolated seeds get their pass if the host wants one."""
    model.train()
    losses = []
    for start in range(0, len(TRAIN[0]), size):
        x, y = (part[start : start + size] for part in TRAIN)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        if isinstance(model, GrowingModel) and model.has_isolated_seeds:
            model.seed_step(lambda x=x, y=y: cross_entropy(model(x), y))  # type: ignore[misc]
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


class Script:
    """Decides by epoch: `{3: ("plant", "2", "mlp", "ramp"), 5: ("blend in", "2")}`."""

    name = "script"
    _OPS: Mapping[str, LifecycleOp] = {
        "plant": LifecycleOp.GERMINATE,
        "blend in": LifecycleOp.ADVANCE,
        "keep": LifecycleOp.FOSSILIZE,
        "prune": LifecycleOp.PRUNE,
    }

    def __init__(self, lines: Mapping[int, tuple[str, ...]]) -> None:
        self.lines = lines

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        line = self.lines.get(int(signals.lifecycle.epoch))
        if line is None:
            return Actions.of(legality.space, op=LifecycleOp.WAIT)
        chosen: dict[str, Tensor | int] = {
            "op": int(self._OPS[line[0]]),
            "slot": signals.catalogue.slots.index(line[1]),
        }
        if line[0] == "plant":
            chosen["blueprint"] = signals.catalogue.index(line[2])
            chosen["blend"] = int(Blend.named(line[3]))
        return Actions.of(legality.space, **chosen)


def states(host: GrowingModel) -> dict[str, Tensor]:
    """Everything that the host and its optimisers are, by name."""
    found = dict(host.state_dict())
    for number, optimizer in enumerate(host.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            found |= {f"optimiser {number} {index} {name}": v for name, v in state.items()}
        for place, group in enumerate(optimizer.param_groups):
            found[f"rate {number} {place}"] = torch.tensor(float(group["lr"]))
    return {name: torch.as_tensor(value).detach().clone() for name, value in found.items()}


def remove_notes(folder: Path, *names: str) -> None:
    """Make a run's checkpoint one of a version of Esper that did not store these notes."""
    checkpoint = folder / CHECKPOINT
    archive = read_archive(checkpoint, kind=KIND, version=VERSION)
    notes = {name: note for name, note in archive.notes.items() if name not in names}
    tensors = {name: tensor.clone() for name, tensor in archive.tensors.items()}
    write_archive(checkpoint, kind=KIND, version=VERSION, tensors=tensors, notes=notes)


def require_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert tensor.shape == right[name].shape, name
        same = tensor.reshape(-1).view(torch.uint8), right[name].reshape(-1).view(torch.uint8)
        assert torch.equal(*same), name
