"""Losses that are known by name, and along which axis of a model's outputs the classes lie.

Shapes: `B` samples, `T` positions (along one axis or several), `C` classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, l1_loss, mse_loss

from esper.leyline.errors import DataError
from esper.tolaria.tasks import mean_loss

Loss = Callable[[Any, Any], Tensor]


def class_axes(outputs: object, targets: object) -> tuple[int, ...]:
    """Which axes of the outputs, of the last and the second, fit these class numbers."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return ()
    counted = not (targets.is_floating_point() or targets.is_complex())
    if not counted or targets.dtype is torch.bool:
        return ()
    if not outputs.is_floating_point() or outputs.dim() < 2:
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
        return CrossEntropy(
            class_axis(
                outputs,
                targets,
                "Cross-entropy",
                "pass loss=torch.nn.functional.cross_entropy if classes are the second axis, and "
                "a function of outputs and targets of your own if not",
            )
        )

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
