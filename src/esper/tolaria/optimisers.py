"""Optimisers over rows: every host and every seed has its own step count, rate and decay.

They give what `torch.optim` gives for each row alone. A row that is not active keeps every bit of
its parameters.

Shapes: `R` rows of a pool, `P` parameters of one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

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
    scale: Tensor | None  # [1, P] learning-rate scale of each parameter; None: all 1

    def scaled_rate(self) -> Tensor:
        """[R, P], or [R, 1] where all parameters of a row share one rate."""
        return self.rate if self.scale is None else self.rate * self.scale


class RowOptimiser(Protocol):
    """Updates many pools in place, given their gradients."""

    moments: ClassVar[int]  # how many matrices of state it needs beside the parameters

    def step(self, pools: Sequence[RowState], grads: Sequence[Tensor]) -> None: ...


def _adopt(pool: RowState, moved: Tensor) -> None:
    torch.where(pool.active, moved, pool.theta, out=pool.theta)


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Stochastic gradient descent with momentum and coupled weight decay."""

    moments: ClassVar[int] = 1
    momentum: float = 0.9

    def step(self, pools: Sequence[RowState], grads: Sequence[Tensor]) -> None:
        for pool, grad in zip(pools, grads, strict=True):
            pool.steps.add_(pool.active)
            (velocity,) = pool.moments
            velocity.mul_(self.momentum).add_(torch.addcmul(grad, pool.theta, pool.decay))
            _adopt(pool, torch.addcmul(pool.theta, velocity, pool.scaled_rate(), value=-1.0))


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay."""

    moments: ClassVar[int] = 2
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def step(self, pools: Sequence[RowState], grads: Sequence[Tensor]) -> None:
        beta1, beta2 = self.betas
        values = list(grads)
        firsts, seconds = ([pool.moments[i] for pool in pools] for i in (0, 1))
        torch._foreach_lerp_(firsts, values, 1.0 - beta1)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, values, values, 1.0 - beta2)
        steps = [pool.steps for pool in pools]
        torch._foreach_add_(steps, [pool.active for pool in pools])
        rates = [pool.scaled_rate() for pool in pools]
        strides = torch._foreach_div(rates, _correction(pools, steps, beta1))
        roots = _correction(pools, steps, beta2)
        torch._foreach_sqrt_(roots)
        denominators = torch._foreach_sqrt(seconds)
        torch._foreach_div_(denominators, roots)
        torch._foreach_add_(denominators, self.epsilon)
        shrinkage = torch._foreach_mul(rates, [pool.decay for pool in pools])
        torch._foreach_neg_(shrinkage)
        torch._foreach_add_(shrinkage, 1.0)
        moved = torch._foreach_mul([pool.theta for pool in pools], shrinkage)
        torch._foreach_addcdiv_(moved, torch._foreach_mul(firsts, strides), denominators, -1.0)
        for pool, new in zip(pools, moved, strict=True):
            _adopt(pool, new)


def _correction(pools: Sequence[RowState], steps: list[Tensor], beta: float) -> list[Tensor]:
    """1 - beta^steps of every row: what the average of a moment still lacks."""
    powers = torch._foreach_pow(beta, steps)
    torch._foreach_neg_(powers)
    torch._foreach_add_(powers, 1.0)
    return [power.to(pool.theta.dtype) for pool, power in zip(pools, powers, strict=True)]
