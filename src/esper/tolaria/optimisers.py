"""Optimisers over rows: every host and every seed has its own step count, rate and decay.

They give what `torch.optim` gives for each row alone. A row that is not active keeps every bit.

Shapes: `R` rows of a pool, `P` parameters of one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass
class RowState:
    """One pool's parameters and everything its optimiser keeps, by row."""

    theta: Tensor  # [R, P]
    moments: list[Tensor]  # [R, P] each
    steps: Tensor  # [R, 1] steps taken, float64
    rate: Tensor  # [R, 1] learning rate
    decay: Tensor  # [R, 1] weight decay
    active: Tensor  # [R, 1] bool: rows that take steps
    scale: Tensor  # [1, P] learning-rate scale of each parameter


class RowOptimiser(Protocol):
    """Updates many pools in place, given their gradients."""

    @property
    def moments(self) -> int:
        """How many matrices of state it needs beside the parameters."""
        ...

    def step(self, pools: Sequence[RowState], grads: Sequence[Tensor]) -> None: ...


def _adopt(pool: RowState, moved: Tensor) -> None:
    pool.theta.copy_(torch.where(pool.active, moved, pool.theta))


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Stochastic gradient descent with momentum and coupled weight decay."""

    momentum: float = 0.9

    @property
    def moments(self) -> int:
        return 1

    def step(self, pools: Sequence[RowState], grads: Sequence[Tensor]) -> None:
        for pool, grad in zip(pools, grads, strict=True):
            pool.steps.add_(pool.active)
            (velocity,) = pool.moments
            velocity.mul_(self.momentum).add_(torch.addcmul(grad, pool.theta, pool.decay))
            _adopt(pool, torch.addcmul(pool.theta, velocity, pool.rate * pool.scale, value=-1.0))


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay."""

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    @property
    def moments(self) -> int:
        return 2

    def step(self, pools: Sequence[RowState], grads: Sequence[Tensor]) -> None:
        beta1, beta2 = self.betas
        grads = list(grads)
        firsts, seconds = ([pool.moments[i] for pool in pools] for i in (0, 1))
        torch._foreach_lerp_(firsts, grads, 1.0 - beta1)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, grads, grads, 1.0 - beta2)
        denominators = torch._foreach_sqrt(seconds)
        for pool, first, denominator in zip(pools, firsts, denominators, strict=True):
            pool.steps.add_(pool.active)
            dtype = pool.theta.dtype
            correction1 = (1.0 - beta1**pool.steps).to(dtype)
            correction2 = (1.0 - beta2**pool.steps).sqrt().to(dtype)
            rate = pool.rate * pool.scale  # [R, P]
            denominator.div_(correction2).add_(self.epsilon)
            shrunk = pool.theta * (1.0 - rate * pool.decay)
            _adopt(pool, shrunk.addcdiv_(first * (rate / correction1), denominator, value=-1.0))
