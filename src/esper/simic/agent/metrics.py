"""What an update reports: kept on the device while it runs, fetched once at its end.

Shapes: `H` heads, `K` optimiser steps, `R` sequences, `T` time.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.heads import ActionSpace
from esper.leyline.results import HeadUpdateMetrics, PerHead, PPOUpdateMetrics
from esper.simic.agent.losses import Terms
from esper.simic.agent.types import SequenceBatch


class GradientNorms(NamedTuple):
    """Before clipping."""

    heads: Tensor  # [H]
    value: Tensor  # []
    total: Tensor  # []


class Tally:
    """Collects tensors during one update; as many as the update has optimiser steps."""

    def __init__(self) -> None:
        self.measured: list[Terms] = []
        self.norms: list[GradientNorms] = []
        self.stopped_by_kl = False

    def report(
        self,
        space: ActionSpace,
        batch: SequenceBatch,
        matters: Tensor,
        error: Tensor,
        return_scale: Tensor,
        learning_rate: float,
    ) -> PPOUpdateMetrics:
        """The metrics, after one synchronisation with the device."""
        device = batch.valid.device
        every = Terms(*(torch.stack(part).detach() for part in zip(*self.measured, strict=True)))
        zeros = GradientNorms(torch.zeros(len(space), device=device), *torch.zeros(2).to(device))
        norms = GradientNorms(*(torch.stack(n) for n in zip(*self.norms or [zeros], strict=True)))
        steps = batch.valid.sum()
        per_head = torch.stack(
            (
                every.policy.mean(0),
                every.entropy.mean(0),
                every.kl[-1],
                every.clipped.mean(0),
                norms.heads.mean(0),
                matters.sum((0, 1)) / steps,
                every.ratio_min.amin(0),
                every.ratio.mean(0),
                every.ratio_max.amax(0),
            ),
            dim=1,
        )  # [H, fields of HeadUpdateMetrics]
        whole = torch.stack(
            (
                every.policy.sum(1).mean(),
                every.value.mean(),
                every.entropy.mean(),
                every.kl[-1].sum(),
                *_value_statistics(batch),
                return_scale,
                norms.total.mean(),
                norms.value.mean(),
                error,
                steps,
            )
        )
        fetched = torch.cat((whole.double(), per_head.double().flatten())).tolist()
        heads, values = fetched[len(whole) :], fetched[: len(whole)]
        width = per_head.shape[1]
        names = HeadUpdateMetrics.__annotations__
        rows = {
            name: HeadUpdateMetrics(**dict(zip(names, heads[i * width :], strict=False)))  # type: ignore[typeddict-item]
            for i, name in enumerate(space.names)
        }
        return PPOUpdateMetrics(
            policy_loss=values[0],
            value_loss=values[1],
            entropy=values[2],
            kl=values[3],
            explained_variance=values[4],
            value_mean=values[5],
            value_std=values[6],
            return_mean=values[7],
            return_std=values[8],
            return_scale=values[9],
            gradient_norm=values[10],
            value_gradient_norm=values[11],
            learning_rate=learning_rate,
            stored_log_prob_error=values[12],
            valid_steps=int(values[13]),
            optimizer_steps=len(self.norms),
            stopped_by_kl=self.stopped_by_kl,
            peak_memory_bytes=_peak_memory(device),
            heads=PerHead(space.names, rows),
        )


def _value_statistics(batch: SequenceBatch) -> tuple[Tensor, ...]:
    """Explained variance, then mean and standard deviation of values and of returns."""
    count = batch.valid.sum()

    def moments(numbers: Tensor) -> tuple[Tensor, Tensor]:
        wide = numbers.double().masked_fill(~batch.valid, 0.0)
        mean = wide.sum() / count
        spread = (wide - mean).masked_fill(~batch.valid, 0.0).square().sum() / count
        return mean, spread

    value_mean, value_variance = moments(batch.values)
    return_mean, return_variance = moments(batch.returns)
    _, unexplained = moments(batch.returns - batch.values)
    explained = torch.where(
        return_variance > 0, 1 - unexplained / return_variance.clamp(min=1e-12), 0.0
    )
    return explained, value_mean, value_variance.sqrt(), return_mean, return_variance.sqrt()


def _peak_memory(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
