"""Losses and scores: what a model is trained on, and what controllers are told of it.

A score is in percent and higher is better. Accuracy is one. Where there is none (regression,
language models), the loss on validation data is turned into one: 100 · exp(−loss / first loss),
where the first loss is that of the model before training. It is 36.8 at the start and 100 without
loss, whatever the loss's unit.

Shapes: `B` samples, `T` positions (along one axis or several), `C` classes.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, l1_loss, mse_loss

from esper.api.batches import Pair
from esper.kasmina.watching import call
from esper.leyline.errors import DataError, EsperError, UnknownNameError, first_line
from esper.tolaria.tasks import mean_loss

Loss = Callable[[Any, Any], Tensor]
Metric = Callable[[Any, Any], "float | Tensor"]

METRICS = ("auto", "accuracy", "loss")
IGNORED = -100  # the label that torch's cross-entropy leaves out


# --- losses --------------------------------------------------------------------------------


def class_axes(outputs: object, targets: object) -> tuple[int, ...]:
    """Which axes of the outputs, of the last and the second, fit these class numbers."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return ()
    counted = not (targets.is_floating_point() or targets.is_complex())
    logits = outputs.is_floating_point() and outputs.dim() >= 2
    if not logits or not counted or targets.dtype is torch.bool:
        return ()
    shape = outputs.shape
    either = dict.fromkeys((outputs.dim() - 1, 1))  # which of [B, C] are one and the same
    return tuple(axis for axis in either if shape[:axis] + shape[axis + 1 :] == targets.shape)


def class_axis(outputs: object, targets: object, what: str, fix: str) -> int:
    """The axis of the classes, if it is certain; `what` needs it, and `fix` does without."""
    axes = class_axes(outputs, targets)
    if not axes:
        raise DataError(
            f"{what} needs logits and class numbers",
            given=f"outputs {form(outputs)}, targets {form(targets)}",
            valid="[B, C] and [B], [B, T, C] and [B, T], or [B, C, T] and [B, T]",
            fix=fix,
        )
    if len(axes) > 1:
        raise DataError(
            f"{what} cannot tell whether classes lie along the second axis or the last",
            given=f"outputs {form(outputs)}, targets {form(targets)}",
            fix=f"take data of another length, or {fix}",
        )
    return axes[0]


@dataclass(frozen=True)
class CrossEntropy:
    """Of logits [B, C], [B, T, C] or [B, C, T], with class numbers [B] or [B, T]."""

    axis: int | None = None  # of the classes; None: looked for in every batch

    def settled(self, outputs: object, targets: object) -> "CrossEntropy":
        """With the axis that this batch shows: in later ones the other may happen to fit too."""
        fix = (
            "pass loss=torch.nn.functional.cross_entropy if classes are the second axis, and a "
            "function of outputs and targets of your own if not"
        )
        return CrossEntropy(class_axis(outputs, targets, "Cross-entropy", fix))

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        axis = self.settled(outputs, targets).axis if self.axis is None else self.axis
        return cross_entropy(outputs, targets) if axis == 1 else mean_loss(outputs, targets)


@dataclass(frozen=True)
class Elementwise:
    """A loss of pairs of numbers, which torch would make of every output and every target."""

    of: Loss

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
        if not tensors or outputs.shape == targets.shape:
            return self.of(outputs, targets)
        fix = "check the model's last layer and the targets' shape and type"
        if outputs.shape == (*targets.shape, 1):
            fix = "give targets[:, None] for targets, or let the model squeeze its last axis"
        raise DataError(
            "The outputs and the targets have different shapes",
            given=f"outputs {form(outputs)}, targets {form(targets)}",
            fix=fix,
        )


LOSSES: dict[str, Loss] = {
    "cross_entropy": CrossEntropy(),
    "mse": Elementwise(mse_loss),
    "l1": Elementwise(l1_loss),
}


def form(value: object) -> str:
    """Type and shape, for messages."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


# --- scores --------------------------------------------------------------------------------


def score_of_loss(loss: float, first_loss: float) -> float:
    """100 · exp(−loss / first_loss): a score in percent for whoever has only a loss."""
    if not math.isfinite(loss):
        raise EsperError(
            "The loss on validation data is not finite",
            given=loss,
            fix="start again with a smaller learning rate, or look for bad data",
        )
    if not first_loss > 0.0 or not loss >= 0.0:
        raise EsperError(
            "Only a loss that is never negative can be turned into a score",
            given=f"loss {loss:g}, at first {first_loss:g}",
            fix="pass a metric of your own: metric=lambda outputs, targets: ... in percent",
        )
    return 100.0 * math.exp(-loss / first_loss)


@dataclass(frozen=True)
class Scores:
    loss: float
    score: float  # percent


@dataclass(frozen=True)
class Scoring:
    """How a run's models are scored."""

    loss: Loss
    metric: str | Metric = "auto"
    first_loss: float | None = None  # of the model before training; what "loss" is relative to
    classes: int | None = None  # of a classifier
    axis: int | None = None  # of the outputs, along which its classes lie

    @classmethod
    def of(cls, loss: str | Loss, metric: str | Metric) -> "Scoring":
        _require_known("loss", loss, LOSSES)
        _require_known("metric", metric, METRICS, " in percent")
        return cls(LOSSES[loss] if isinstance(loss, str) else loss, metric)

    def settled(self, model: nn.Module, batch: Pair) -> "Scoring":
        """With what "auto" means for these outputs and targets, tried on a batch."""
        inputs, targets = batch
        with torch.no_grad():
            outputs: Any = call(model, inputs)
        try:
            value = self.loss(outputs, targets)
        except EsperError:
            raise
        except Exception as error:  # the user's code, or torch's complaint about shapes
            raise DataError(
                "The loss fails on the model's outputs and the targets",
                given=f"{form(outputs)} and {form(targets)}: {first_line(error)}",
                fix="check the model's last layer and the targets' shape and type",
            ) from error
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise DataError(
                "The loss must return one number as a tensor",
                given=form(value),
                fix="take the mean over the batch",
            )
        loss, metric, classes, axis = self.loss, self.metric, None, None
        if isinstance(loss, CrossEntropy):
            loss = loss.settled(outputs, targets)
        if metric == "auto":
            one_each = bool(class_axes(outputs, targets)) and outputs.dim() == 2
            metric = "accuracy" if one_each else "loss"
        if metric == "accuracy":
            fix = "choose metric='loss', or pass a function of outputs and targets"
            axis = class_axis(outputs, targets, "Accuracy", fix)
            classes = max(int(outputs.shape[axis]), 2)
        return replace(self, loss=loss, metric=metric, classes=classes, axis=axis)

    @torch.no_grad()
    def scores(self, model: nn.Module, batches: Iterable[Pair]) -> Scores:
        """Over all batches; the model's mode is the caller's business."""
        losses, points, weights, counts = [], [], [], []
        for inputs, targets in batches:
            outputs: Any = call(model, inputs)
            size = len(targets) if isinstance(targets, Tensor) and targets.dim() else 1
            losses.append(self.loss(outputs, targets).detach())
            weights.append(size)
            if self.metric == "accuracy":
                counted = targets != IGNORED
                points.append(((outputs.argmax(self.axis) == targets) & counted).sum())
                counts.append(counted.sum())
            elif callable(self.metric):
                points.append(torch.as_tensor(self.metric(outputs, targets)))
        sizes = torch.tensor(weights, dtype=torch.float64)
        loss = float((torch.stack(losses).cpu().double() * sizes).sum() / sizes.sum())
        if counts:
            found, of = (int(torch.stack(numbers).sum()) for numbers in (points, counts))
            return Scores(loss, 100.0 * found / max(of, 1))
        if points:
            values = torch.stack(points).cpu().double()
            return Scores(loss, float((values * sizes).sum() / sizes.sum()))
        return Scores(loss, score_of_loss(loss, self.first_loss or loss))


def _require_known(what: str, value: object, names: Iterable[str], unit: str = "") -> None:
    """Refuse what is neither one of these names nor a function."""
    if isinstance(value, str):
        if value not in names:
            fix = f"or any function of outputs and targets{unit}"
            raise UnknownNameError.of(what, value, names, fix)
    elif not callable(value):
        raise EsperError(
            f"The {what} must be a name or a function",
            given=type(value).__name__,
            valid=f"{', '.join(names)}, or {what}(outputs, targets){unit}",
        )
