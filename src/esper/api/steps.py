"""Watches the optimiser's steps: gradient norms for the gates, and whether ticks are forgotten."""

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from esper.kasmina.slot import Seed

if TYPE_CHECKING:
    from esper.api.hosts import GrowingModel

HOST_EVERY = 32  # steps between two looks at the gradient of the whole host
UNTICKED_STEPS = 1000  # without any tick, until it is said that one seems to be forgotten
# From evaluation to training before the first tick, until the same is said. Many validate more than
# once within an epoch; how long theirs are is known from the first tick on.
UNTICKED_RETURNS = 10
LONGER_EPOCHS = 3  # times the longest epoch so far without a tick, until the same is said


class ForgottenTickWarning(UserWarning):
    """Training goes on and on, and nothing can grow because `tick` is not called."""


class FractionWarning(UserWarning):
    """Scores seem to be fractions, where percent are expected."""


class StepWatch:
    """Goes with every step of the optimiser; costs next to nothing while no seed is there."""

    def __init__(self, host: "GrowingModel") -> None:
        self.host = host
        self.present: list[tuple[str, Seed]] = []  # seeds that exist, by slot
        self.steps = 0  # since the last tick
        self.longest = 0  # steps between two ticks
        self._said = False  # since the last tick, that it seems to be forgotten
        self._returns = 0
        self._steps_at_return = 0
        self._squares: dict[str, list[Tensor]] = {}  # of seeds' gradient norms, by slot
        self._host_squares: list[Tensor] = []
        self._set_aside: list[tuple[Optimizer, dict[str, Any]]] = []

    def follow(self, optimizer: Optimizer) -> None:
        """Be called around every step of this optimiser."""
        optimizer.register_step_pre_hook(self.before_step)
        optimizer.register_step_post_hook(lambda *_: self.bring_back())

    def bring_back(self) -> None:
        """Groups that were set aside for a step return to their optimiser."""
        while self._set_aside:
            optimizer, group = self._set_aside.pop()
            optimizer.param_groups.append(group)

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        self.bring_back()  # in case that the last step failed
        if not optimizer.param_groups[-1]["params"]:  # for scalar gates, and there are none: idle
            self._set_aside.append((optimizer, optimizer.param_groups.pop()))
        if self.steps >= (LONGER_EPOCHS * self.longest or UNTICKED_STEPS):
            self._say_forgotten()
        if not self.present and self.steps % HOST_EVERY != 1:
            return
        scale = getattr(optimizer, "grad_scale", None)  # fused optimisers undo it themselves
        for name, seed in self.present:
            if (square := _square_of(seed, scale)) is not None:
                self._squares.setdefault(name, []).append(square)
        if self.steps % HOST_EVERY == 1:
            square = _square_of(self.host.model, scale)
            if square is not None:
                self._host_squares.append(square)

    def returned_to_training(self) -> None:
        """Evaluation is over, and training goes on: perhaps a new epoch."""
        if self.steps > self._steps_at_return:
            self._steps_at_return = self.steps
            self._returns += 1
            if self._returns >= UNTICKED_RETURNS and not self.longest:
                self._say_forgotten()

    def gradients(self) -> tuple[dict[str, float], float]:
        """Root mean squares of the gradient norms since the last tick: seeds', and the host's."""
        seeds = {name: _root_mean(squares) for name, squares in self._squares.items()}
        return seeds, _root_mean(self._host_squares)

    def start_epoch(self) -> None:
        """A tick was called."""
        self.go_on(0, max(self.longest, self.steps))

    def go_on(self, steps: int, longest: int) -> None:
        """From here, with so many steps since the last tick, and between any two at most."""
        self.steps, self.longest = steps, longest
        self._said = False
        self._returns = self._steps_at_return = 0
        self._squares, self._host_squares = {}, []

    def _say_forgotten(self) -> None:
        if self._said:
            return
        self._said = True
        warnings.warn(
            f"{self.steps} optimiser steps without host.tick(...), so nothing can grow; "
            "call it once after every epoch.",
            ForgottenTickWarning,
            stacklevel=4,
        )


def _square_of(module: nn.Module, scale: Tensor | None) -> Tensor | None:
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    if not gradients:
        return None
    with torch.no_grad():
        norm = get_total_norm(gradients).float()
        return (norm if scale is None else norm / scale).square()


def _root_mean(squares: list[Tensor]) -> float:
    if not squares:
        return math.nan
    return math.sqrt(float(torch.stack(squares).mean()))
