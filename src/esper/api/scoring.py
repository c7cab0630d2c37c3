"""Losses and scores: what a model is trained on, and what controllers are told of it.

A score is in percent and higher is better. Accuracy is one. Where there is none (regression,
language models), the loss on validation data is turned into one: 100 · exp(−loss / first loss),
where the first loss is that of the model before training. It is 36.8 at the start and 100 without
loss, whatever the loss's unit. A metric of the user's is a function of one batch, whose mean over
samples is taken for percent, or an object with `update`, `compute` and `reset` (as torchmetrics
has them), which sees all batches before it is asked; one that says it ends at 1 is multiplied by
100.

Shapes: `B` samples, `T` positions (along one axis or several), `C` classes.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy, l1_loss, mse_loss
from torch.utils._pytree import tree_map_only

from esper.api.batches import IGNORED, Pair
from esper.api.ticking import number, percent
from esper.kasmina.watching import call
from esper.leyline.errors import DataError, EsperError, in_words, require_known
from esper.tolaria.tasks import mean_loss

Loss = Callable[[Any, Any], Tensor]
Metric = Callable[[Any, Any], "float | Tensor"]
Total = Callable[[Tensor], Tensor]

METRICS = ("auto", "accuracy", "loss")
# Losses of torch's own that say more of outputs and targets: classes lie along the second axis, or
# every output is a label of its own, which holds above this number.
_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, cross_entropy, F.nll_loss)
_OF_LABELS = {
    0.0: (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits),
    0.5: (nn.BCELoss, F.binary_cross_entropy),
}
_COLLECTS = ("update", "compute", "reset")
SAME_LOSS = 1e-3  # relative difference below which two ways to compute a batch's loss agree


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
    if len(axes) == 1:
        return axes[0]
    lacking = f"{what} needs logits and class numbers"
    doubtful = f"{what} cannot tell whether classes lie along the second axis or the last"
    raise DataError(
        doubtful if axes else lacking,
        given=f"outputs {form(outputs)}, targets {form(targets)}",
        valid="[B, C] and [B], [B, T, C] and [B, T], or [B, C, T] and [B, T]",
        fix=f"take data of another length, or {fix}" if axes else fix,
    )


@dataclass(frozen=True)
class CrossEntropy:
    """Of logits [B, C], [B, T, C] or [B, C, T], with class numbers [B] or [B, T]."""

    axis: int | None = None  # of the classes; None: looked for in every batch

    def settled(self, outputs: object, targets: object) -> "CrossEntropy":
        """With the axis that this batch shows: in later ones the other may happen to fit too."""
        fix = _advice(outputs, targets) or (
            "pass loss=torch.nn.functional.cross_entropy if classes are the second axis, and a "
            "function of outputs and targets of your own if not"
        )
        return CrossEntropy(class_axis(outputs, targets, "Cross-entropy", fix))

    def __call__(self, outputs: Any, targets: Any, reduction: str = "mean") -> Tensor:
        axis = self.settled(outputs, targets).axis if self.axis is None else self.axis
        labels = targets.long()
        if reduction == "mean" and axis != 1:
            return mean_loss(outputs, labels)
        return cross_entropy(outputs.movedim(axis or -1, 1), labels, reduction=reduction)


@dataclass(frozen=True)
class Elementwise:
    """A loss of pairs of numbers, which torch would make of every output and every target."""

    of: Callable[..., Tensor]

    def __call__(self, outputs: Any, targets: Any, reduction: str = "mean") -> Tensor:
        tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
        if not tensors or outputs.shape == targets.shape:
            # (Arrays of numpy are of float64 where nobody asked for it.)
            real = tensors and not targets.is_complex()
            wanted = targets.to(outputs.dtype) if real else targets
            return self.of(outputs, wanted, reduction=reduction)
        fix = "check the model's last layer and the targets' shape and type"
        if outputs.shape == (*targets.shape, 1):
            fix = "give targets[:, None] for targets, or let the model squeeze its last axis"
        raise DataError(
            "The outputs and the targets have different shapes",
            given=f"outputs {form(outputs)}, targets {form(targets)}",
            fix=fix,
        )


def _of_samples(loss: Any) -> Loss | None:
    """The same loss without a mean over samples and positions, if it is known how."""
    if getattr(loss, "reduction", None) == "mean":
        apart: Loss = copy.copy(loss)
        vars(apart).update(reduction="none")
        return apart
    named = getattr(F, getattr(loss, "__name__", ""), None) is loss
    known = named or isinstance(loss, CrossEntropy | Elementwise)
    return partial(loss, reduction="none") if known else None


LOSSES: dict[str, Loss] = {
    "cross_entropy": CrossEntropy(),
    "mse": Elementwise(mse_loss),
    "l1": Elementwise(l1_loss),
}


def _advice(outputs: object, targets: object) -> str | None:
    """How to come by logits and class numbers, where it is plain what was given instead."""
    if not isinstance(outputs, Tensor):
        key = next(iter(outputs), 0) if isinstance(outputs, Mapping) else 0
        part = "logits" if isinstance(outputs, Mapping) and "logits" in outputs else key
        return (
            "take the tensor out of what the model returns: loss=lambda outputs, targets: "
            f"torch.nn.functional.cross_entropy(outputs[{part!r}], targets)"
        )
    if not isinstance(targets, Tensor):
        return "let the data give targets as a tensor"
    if targets.shape == outputs.shape and outputs.dim() > 1:
        return "give class numbers in place of one-hot rows: targets.argmax(-1)"
    if targets.is_floating_point() or targets.dtype is torch.bool:
        return "give class numbers as whole numbers: targets.long()"
    if targets.dim() == outputs.dim() and targets.shape[-1] == 1:
        return "give targets without their last axis: targets.squeeze(-1)"
    return None


def _require_labels(classes: int, labels: Tensor) -> None:
    """Refuse class numbers that are none of the model's; a GPU would only say that it failed."""
    if classes == 1:
        fix = "give the model an output for each class, or pass loss=torch.nn.BCEWithLogitsLoss()"
        raise DataError("The cross-entropy of one class is always 0", given="one output", fix=fix)
    least, most = (int(labels.min()), int(labels.max())) if labels.numel() else (0, 0)
    if least < 0 or most >= classes:
        given, valid = f"labels from {least} to {most}", f"0 to {classes - 1}"
        fix = "check the model's last layer, and count classes from 0"
        raise DataError("Some labels are no class of the model", given=given, valid=valid, fix=fix)


def _failing(what: str, fix: str, *values: object) -> AbstractContextManager[None]:
    """What the user's code raises inside, or torch about shapes, becomes one sentence."""
    given = f"{' and '.join(map(form, values))}: "
    return in_words(what, given=given, fix=fix, error=DataError)


def _is_one_of(loss: object, kinds: Iterable[Any]) -> bool:
    return any(isinstance(loss, kind) if isinstance(kind, type) else loss is kind for kind in kinds)


def _instance(what: str, given: Any) -> Any:
    """Of a class, such as nn.CrossEntropyLoss, an instance; anything else as it is."""
    if not isinstance(given, type):
        return given
    fix = f"make an instance of it: {what}={given.__name__}(...)"
    with _failing(f"The {what} is a class that cannot be made without arguments", fix, given):
        return given()


def form(value: object) -> str:
    """Type and shape, for messages."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return value.__name__ if isinstance(value, type) else type(value).__name__


# --- scores --------------------------------------------------------------------------------


def score_of_loss(loss: float, first_loss: float) -> float:
    """100 · exp(−loss / first_loss): a score in percent for whoever has only a loss."""
    number("The loss on validation data", loss)
    if not first_loss > 0.0 or not loss >= 0.0:
        raise EsperError(
            "Only a loss that is never negative can be turned into a score",
            given=f"loss {loss:g}, at first {first_loss:g}",
            fix="pass a metric of your own in percent: metric= to esper.grow, evaluate= elsewhere",
        )
    return 100.0 * math.exp(-loss / first_loss)


@dataclass(frozen=True)
class Scores:
    loss: float
    score: float  # percent


@dataclass(frozen=True)
class Scoring:
    """How a run's models are run and scored."""

    loss: Loss
    metric: str | Metric = "auto"
    autocast: str | None = None  # the kind of device that computes in bf16 where that is safe
    first_loss: float | None = None  # of the model before training; what "loss" is relative to
    classes: int | None = None  # of a classifier
    axis: int | None = None  # of the outputs, along which its classes lie
    threshold: float | None = None  # where outputs are labels of their own: above it they hold
    ignored: int | None = None  # class number that does not count; None: targets are no classes

    @classmethod
    def of(
        cls, loss: str | Loss, metric: str | Metric, device: Any = "cpu", half: str | None = None
    ) -> "Scoring":
        made, judge = _instance("loss", loss), _instance("metric", metric)
        score = getattr(judge, "compute", judge)
        for what, each, names in (("loss", made, LOSSES), ("metric", score, METRICS)):
            if not callable(each):
                given = each if isinstance(each, str) else form(each)
                other = f"or any function {what}(outputs, targets), a metric in percent"
                require_known(what, given, names, other)
        for each in (made, judge):
            if callable(move := getattr(each, "to", None)):
                move(device)
        if isinstance(made, nn.Module) and any(p.requires_grad for p in made.parameters()):
            fix = "make them part of the model, or freeze them with loss.requires_grad_(False)"
            raise EsperError("The loss's parameters would not learn", given=form(made), fix=fix)
        if getattr(judge, "higher_is_better", None) is False:
            fix = "turn it round, or leave metric away: the loss is then turned into a score"
            raise EsperError("The metric says that lower is better", given=form(judge), fix=fix)
        return cls(LOSSES[made] if isinstance(made, str) else made, judge, half)

    @property
    def named(self) -> str | None:
        """The metric, if it is one of Esper's: an object of one's own may overload ==."""
        return self.metric if isinstance(self.metric, str) else None

    @property
    def collects(self) -> bool:
        """Does the metric see all batches before it is asked?"""
        return all(callable(getattr(self.metric, each, None)) for each in _COLLECTS)

    @property
    def unit(self) -> float:
        """Percent in one of the metric's: torchmetrics says where a metric ends."""
        most = getattr(self.metric, "plot_upper_bound", None) if self.collects else None
        return 100.0 if isinstance(most, (int, float)) and most == 1 else 1.0

    @property
    def meaning(self) -> str:
        """What a score is, in words."""
        if self.named == "accuracy":
            return "the share of labels that are right, in percent"
        if self.named is not None:
            first = f"{self.first_loss or math.nan:.4g}"
            return f"100 · exp(−loss / {first}): 36.8 before training, 100 without loss"
        name = getattr(self.metric, "__name__", type(self.metric).__name__)
        over = "all validation data at once" if self.collects else "validation samples, on average"
        ends = "times 100, since it ends at 1" if self.unit > 1.0 else "taken for percent"
        return f"{name} over {over}, {ends}"

    def run(self, model: nn.Module, batch: Pair) -> tuple[Any, Tensor]:
        """What the model returns and its loss, in the run's precision."""
        inputs, targets = batch
        half = self.autocast
        with nullcontext() if half is None else torch.autocast(half, torch.bfloat16):
            outputs: Any = call(model, inputs)
            fix = "a loss is a function of outputs and targets: check their shapes and types"
            with _failing("The loss fails on outputs and targets", fix, outputs, targets):
                return outputs, self.loss(outputs, targets)

    @torch.no_grad()
    def settled(self, model: nn.Module, batch: Pair, part: str = "train") -> "Scoring":
        """With what "auto" means for these outputs and targets, tried on a batch of that part."""
        inputs, targets = batch
        fix = f"give {part} the inputs that its forward takes"
        with _failing(f"The model fails on the {part} data", fix, inputs):
            outputs: Any = call(model, inputs)
        loss, metric, ignored = self.loss, self.metric, getattr(self.loss, "ignore_index", IGNORED)
        axes, known = class_axes(outputs, targets), self.axis
        if isinstance(loss, CrossEntropy):
            if loss.axis is None or not axes:
                loss = loss.settled(outputs, targets)
            known = loss.axis
        elif _is_one_of(loss, _OF_CLASSES):
            known = 1
        if axes and known is not None:  # another batch may happen to fit both ways
            axes = (known,)
        if axes and _is_one_of(loss, (CrossEntropy, *_OF_CLASSES)):
            _require_labels(outputs.shape[axes[0]], targets[targets != ignored])
        _require_loss(self.run(model, batch)[1], part)
        classes = axis = threshold = None
        if self.named == "auto":
            metric = "accuracy" if axes and outputs.dim() == 2 else "loss"
        if isinstance(metric, str) and metric == "accuracy":
            limits = [limit for limit, kinds in _OF_LABELS.items() if _is_one_of(loss, kinds)]
            if limits and not axes:
                threshold, classes = limits[0], 2
            else:
                fix = "choose metric='loss', or pass a function of outputs and targets"
                axis = axes[0] if len(axes) == 1 else class_axis(outputs, targets, "Accuracy", fix)
                classes = max(int(outputs.shape[axis]), 2)
        counted = ignored if axes else None
        found = replace(self, loss=loss, metric=metric, classes=classes, axis=axis)
        return replace(found, threshold=threshold, ignored=counted)

    @torch.no_grad()
    def scores(
        self, model: nn.Module, batches: Iterable[Pair], total: Total = lambda n: n
    ) -> Scores:
        """Over all batches; the model's mode is the caller's business. Of several processes with
        batches of their own, `total` sums numbers over all; a metric that collects needs all.
        """
        judge: Any = self.metric
        fix = "pass a function of outputs and targets that returns one number in percent"
        losses, points, weights, counts = [], [], [], []
        if self.collects:
            judge.reset()
        for inputs, targets in batches:
            outputs, loss = self.run(model, (inputs, targets))
            if self.autocast is not None:  # metrics, and numpy in them, know no bf16
                outputs = tree_map_only(Tensor, _without_bf16, outputs)
            losses.append(loss.detach())
            weights.append(self._batch_weight(targets))
            with _failing("The metric fails on outputs and targets", fix, outputs, targets):
                if self.classes is not None:
                    right, counted = self._right(outputs, targets)
                    points.append((right & counted).sum())
                    counts.append(counted.sum())
                elif self.collects:
                    judge.update(outputs, targets)
                elif self.named is None:
                    points.append(_one_number(judge(outputs, targets)))
        sizes, each, found = map(_column, (weights, losses, points))
        # A batch without any label that counts has no loss.
        known = torch.where(sizes > 0, each, 0.0)
        found = found if self.classes is not None else found * sizes[: len(found)]
        sums = [(known * sizes).sum(), sizes.sum(), found.sum(), _column(counts).sum()]
        lost, size, gained, of = total(torch.stack(sums)).tolist()
        if not size:
            raise DataError("No label counts", given=f"{self.ignored} alone", fix="label the data")
        mean = lost / size
        if self.classes is not None:
            return Scores(mean, 100.0 * gained / max(of, 1.0))
        if self.collects:
            with _failing("The metric cannot be computed", fix, judge):
                value = self.unit * float(_one_number(judge.compute()))
            judge.reset()
        elif self.named is None:
            value = gained / size
        else:
            return Scores(mean, score_of_loss(mean, self.first_loss or mean))
        return Scores(mean, percent("The metric", value))

    @torch.no_grad()
    def losses(self, model: nn.Module, batches: Iterable[Pair]) -> Tensor:
        """Of every sample, where the loss is one of torch's or has a name; else of every batch."""
        loss, found = _of_samples(self.loss), []
        for inputs, targets in batches:
            outputs, mean = self.run(model, (inputs, targets))
            if self.autocast is not None:  # small differences are lost in bf16
                outputs = tree_map_only(Tensor, _without_bf16, outputs)
            each = None if loss is None else loss(outputs, targets)
            if each is not None and each.dim() and len(each) == len(targets):
                found.append(each.flatten(1).mean(1) if each.dim() > 1 else each)
            else:
                found.append(mean.reshape(1))
        return torch.cat(found).float() if found else torch.zeros(0)

    @torch.no_grad()
    def sample_scores(self, model: nn.Module, batches: Iterable[Pair]) -> tuple[Tensor, Tensor]:
        """Score every sample; the model's mode is up to the caller.

        The weighted mean of the scores is the score of the model: its accuracy in percent, the
        value of a function that was passed as metric, or where the metric is the loss, the negative
        loss. A function of a batch, as metric or as loss, scores the batch and not its samples.

        Returns:
            Scores and weights, each [samples] in float64 on the CPU.
        """
        scores, weights = [torch.zeros(0)], [torch.zeros(0)]
        for inputs, targets in batches:
            outputs, loss = self.run(model, (inputs, targets))
            if self.autocast is not None:
                outputs = tree_map_only(Tensor, _without_bf16, outputs)
            if self.classes is not None:
                is_right, counts = self._right(outputs, targets)
                batch_weights = _by_sample(counts).sum(1)
                right_labels = _by_sample(is_right & counts).sum(1)
                batch_scores = 100.0 * right_labels / batch_weights.clamp(min=1)
            elif self.named is None:
                metric: Any = self.metric
                batch_scores = _one_number(metric(outputs, targets)).reshape(1)
                batch_weights = self._batch_weight(targets).reshape(1)
            else:
                losses, batch_weights = self._sample_losses(outputs, targets, loss)
                batch_scores = -losses
            scores.append(batch_scores)
            weights.append(batch_weights)
        joined_scores = torch.cat([part.cpu().double() for part in scores])
        joined_weights = torch.cat([part.cpu().double() for part in weights])
        return joined_scores, joined_weights

    def _batch_weight(self, targets: Any) -> Tensor:
        """Count what the mean loss of a batch is a mean over: its samples, or labels that count."""
        if self.ignored is not None:
            labels: Tensor = (targets != self.ignored).sum()
            return labels
        size = len(targets) if isinstance(targets, Tensor) and targets.dim() else 1
        return torch.tensor(size)

    def _sample_losses(
        self, outputs: Any, targets: Any, batch_loss: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss of every sample of a batch, [samples], and its weight, [samples].

        The batch is one sample where the loss of a sample is not known, or where the batch's loss
        is not the weighted mean of them, as with weights of classes.
        """
        batch_weight = self._batch_weight(targets).reshape(1)
        # A batch without any label that counts has no loss.
        batch_mean = batch_loss.reshape(1) if bool(batch_weight > 0) else torch.zeros(1)
        unreduced_loss = _of_samples(self.loss)
        if unreduced_loss is None:
            return batch_mean, batch_weight
        elements = unreduced_loss(outputs, targets)
        if not elements.dim() or len(elements) != len(targets):
            return batch_mean, batch_weight
        if self.ignored is None:
            weights = torch.ones(len(elements), device=elements.device)
            losses = _by_sample(elements).mean(1)
        else:
            weights = _by_sample(targets != self.ignored).sum(1)
            losses = _by_sample(elements).sum(1) / weights.clamp(min=1)
        mean = (losses * weights).sum() / weights.sum().clamp(min=1)
        if not math.isclose(float(mean), float(batch_mean), rel_tol=SAME_LOSS, abs_tol=1e-12):
            return batch_mean, batch_weight
        return losses, weights

    def _right(self, outputs: Tensor, targets: Any) -> tuple[Tensor, Tensor]:
        """Which labels are right, and which count."""
        if self.threshold is not None:
            right = (outputs > self.threshold) == (targets > 0.5)
            return right, torch.ones_like(right)
        return outputs.argmax(self.axis) == targets, targets != self.ignored


def _require_loss(value: object, part: str) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        several = isinstance(value, Tensor)
        fix = "take the mean over the batch" if several else "return it, and without item()"
        raise DataError("The loss must return one number as a tensor", given=form(value), fix=fix)
    if not bool(value.isfinite()):
        given = f"{float(value)} on the {part} data"
        fix = "look for NaN in inputs and targets, then for a division by zero in model and loss"
        raise DataError("The loss before training is not finite", given=given, fix=fix)


def _column(numbers: list[Tensor]) -> Tensor:
    """[numbers], also where there are none."""
    return torch.stack(numbers).cpu().double() if numbers else torch.zeros(0).double()


def _by_sample(elements: Tensor) -> Tensor:
    """Arrange elements [samples, ...] as [samples, elements of a sample]."""
    return elements.reshape(len(elements), -1)


def _without_bf16(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor


def _one_number(value: object) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, (int, float, np.number)):
        return torch.tensor(float(value), dtype=torch.float64)
    fix = "take the mean over classes and samples, in percent"
    raise DataError("The metric must return one number", given=form(value), fix=fix)
