"""One fused training step: all hosts, all seeds, isolated ones in a pass of their own."""

from collections.abc import Mapping

import torch
from torch import Tensor

from esper.tolaria.engine import Engine, losses_of
from esper.tolaria.optimisers import RowOptimiser
from esper.tolaria.plan import HOST, Plan, PoolKey
from esper.tolaria.pools import Pool


def cast_weights(
    pools: Mapping[PoolKey, Pool], compute_dtype: torch.dtype | None
) -> dict[PoolKey, Tensor]:
    """Every pool's rows as the pass uses them, cast once if it computes in another precision."""
    if compute_dtype is None:
        return {key: pool.leaf for key, pool in pools.items()}
    return {key: pool.leaf.to(compute_dtype) for key, pool in pools.items()}


def as_inputs(inputs: Tensor, weights: Mapping[PoolKey, Tensor]) -> Tensor:
    """Inputs in the precision of the pass; tokens stay what they are."""
    return inputs.to(weights[HOST].dtype) if inputs.is_floating_point() else inputs


class TrainingStep:
    """Gradients and update for one structure of the population."""

    def __init__(
        self,
        engine: Engine,
        pools: Mapping[PoolKey, Pool],
        optimiser: RowOptimiser,
        training: Plan,
        isolated: Plan | None,
        learners: Mapping[PoolKey, Tensor],
        compute_dtype: torch.dtype | None,
        live: Tensor | None = None,
    ) -> None:
        """`live` [N, P]: weights of hosts that exist, where not all do."""
        self.engine, self.pools, self.optimiser = engine, pools, optimiser
        self.training, self.isolated, self.learners = training, isolated, learners
        self.compute_dtype, self.live = compute_dtype, live
        self.keys = [HOST, *training.pool_keys()]
        self.isolated_keys = (
            [] if isolated is None else [k for k in isolated.pool_keys() if k in learners]
        )

    def run(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Train on one batch an environment, [N, B, ...]; returns the losses [N]."""
        losses, grads = self.gradients(inputs, labels)
        with torch.no_grad():
            pools = [self.pools[key] for key in grads]
            values = list(grads.values())
            torch._foreach_addcmul_([pool.squares for pool in pools], values, values, 1.0)
            self.optimiser.step([pool.state for pool in pools], values)
        return losses.detach()

    def gradients(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, dict[PoolKey, Tensor]]:
        """Losses [N] and the gradient of every pool that takes part, [R, P]."""
        weights = cast_weights(self.pools, self.compute_dtype)
        inputs = as_inputs(inputs, weights)
        losses = losses_of(self.engine.logits(weights, self.training, inputs), labels)
        found = torch.autograd.grad(losses.sum(), [self.pools[k].leaf for k in self.keys])
        grads = dict(zip(self.keys, found, strict=True))
        if self.live is not None:  # host n is row n; the spare row comes last
            grads[HOST][:-1].mul_(self.live)
        if self.isolated is not None:
            rows = self.isolated.environment
            if rows is not None:
                inputs, labels = inputs[rows], labels[rows]
            weights[HOST] = weights[HOST].detach()
            alone = losses_of(self.engine.logits(weights, self.isolated, inputs), labels).sum()
            leaves = [self.pools[key].leaf for key in self.isolated_keys]
            for key, grad in zip(
                self.isolated_keys, torch.autograd.grad(alone, leaves), strict=True
            ):
                others = grads.get(key)
                others = torch.zeros_like(grad) if others is None else others
                grads[key] = torch.where(self.learners[key], grad, others)
        return losses, grads
