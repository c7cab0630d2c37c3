"""Losses and scores: what a model is trained on, and what controllers are told of it.

A score is in percent and higher is better. Accuracy is one. Where there is none (regression,
language models), the loss on validation data is turned into one: 100 · exp(−loss / first loss),
where the first loss is that of the model before training. It is 36.8 at the start and 100 without
loss, whatever the loss's unit.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from esper.api.batches import Pair
from esper.api.losses import LOSSES, CrossEntropy, Loss, class_axes, class_axis, form
from esper.kasmina.watching import call
from esper.leyline.errors import DataError, EsperError, UnknownNameError, first_line

Metric = Callable[[Any, Any], "float | Tensor"]

METRICS = ("auto", "accuracy", "loss")
IGNORED = -100  # the label that torch's cross-entropy leaves out


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
        if isinstance(loss, str):
            if loss not in LOSSES:
                raise UnknownNameError.of("loss", loss, LOSSES, "or any function of outputs and "
                                          "targets")  # fmt: skip
            loss = LOSSES[loss]
        elif not callable(loss):
            raise EsperError(
                "The loss must be a name or a function",
                given=type(loss).__name__,
                valid=f"{', '.join(LOSSES)}, or loss(outputs, targets)",
            )
        if isinstance(metric, str) and metric not in METRICS:
            raise UnknownNameError.of("metric", metric, METRICS, "or any function of outputs and "
                                      "targets, in percent")  # fmt: skip
        if not isinstance(metric, str) and not callable(metric):
            raise EsperError(
                "The metric must be a name or a function",
                given=type(metric).__name__,
                valid=f"{', '.join(METRICS)}, or metric(outputs, targets) in percent",
            )
        return cls(loss, metric)

    def settled(self, model: nn.Module, batch: Pair) -> "Scoring":
        """With what "auto" means for these outputs and targets, tried on a batch."""
        inputs, targets = batch
        with torch.no_grad():
            outputs: Any = call(model, inputs)
        self._require_loss(outputs, targets)
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

    def _require_loss(self, outputs: object, targets: object) -> None:
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
