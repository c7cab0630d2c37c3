"""What an update reports: kept on the device while it runs, fetched once at its end.

Shapes: `H` heads, `K` optimiser steps, `R` sequences, `T` time.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from esper.leyline.heads import ActionSpace
from esper.leyline.results import (
    HeadGradientNorms,
    HeadUpdateMetrics,
    PerHead,
    PPOUpdateMetrics,
)
from esper.simic.agent.losses import Terms
from esper.simic.agent.processes import Processes
from esper.simic.agent.types import SequenceBatch

SUMS, EXTREMES = (
    ("policy", "entropy", "kl", "clipped", "ratio", "value"),
    ("ratio_min", "ratio_max"),
)

V = TypeVar("V")


class GradientNorms(NamedTuple):
    """Before clipping."""

    heads: Tensor  # [H]
    value: Tensor  # []
    total: Tensor  # []


def fetched(tensor: Tensor) -> list[float]:
    """The numbers [n] themselves: the one place where an update waits for the device."""
    numbers: list[float] = tensor.double().tolist()
    return numbers


@dataclass
class Tally:
    """Collects tensors during one update; as many as the update has optimiser steps."""

    space: ActionSpace
    processes: Processes
    tolerance: float  # for the error of stored log-probs
    measured: list[Terms] = field(default_factory=list)
    norms: list[GradientNorms] = field(default_factory=list)
    stopped_by_kl: bool = False

    def report(
        self,
        batch: SequenceBatch,
        counts: Tensor,
        error: Tensor,
        return_scale: Tensor,
        learning_rate: float,
    ) -> PPOUpdateMetrics:
        """The metrics of all processes together, after one synchronisation with the device.

        `counts` [H + 1] and `error` [] are those of all processes already.
        """
        device, heads = batch.valid.device, len(self.space)
        every = self._of_all_processes()
        zeros = GradientNorms(
            torch.zeros(heads, device=device), *torch.zeros(2, device=device).unbind()
        )
        norms = GradientNorms(*(torch.stack(n) for n in zip(*self.norms or [zeros], strict=True)))
        per_head = torch.stack(
            (
                every.policy.mean(0),
                every.entropy.mean(0),
                every.kl[-1],
                every.clipped.mean(0),
                counts[:-1] / counts[-1],
                every.ratio_min.amin(0),
                every.ratio.mean(0),
                every.ratio_max.amax(0),
                norms.heads.mean(0),
            ),
            dim=1,
        )  # [H, fields of HeadUpdateMetrics and the gradient's norm]
        whole = torch.stack(
            (
                every.policy.sum(1).mean(),
                every.value.mean(),
                every.entropy.mean(),
                every.kl[-1].sum(),
                *_value_statistics(batch, self.processes),
                return_scale,
                norms.total.mean(),
                norms.value.mean(),
                error,
                counts[-1],
            )
        )
        numbers = fetched(torch.cat((whole.double(), per_head.double().flatten())))
        values, rest = numbers[: len(whole)], numbers[len(whole) :]
        width = per_head.shape[1]
        rows = [rest[width * head : width * (head + 1)] for head in range(heads)]
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
            gradient_norms=HeadGradientNorms(
                self._by_head([row[-1] for row in rows]), value=values[11]
            ),
            learning_rate=learning_rate,
            stored_log_prob_error=values[12],
            stored_log_prob_tolerance=self.tolerance,
            valid_steps=int(values[13]),
            optimizer_steps=len(self.norms),
            stopped_by_kl=self.stopped_by_kl,
            peak_memory_bytes=_peak_memory(device),
            heads=self._by_head([_head_metrics(row[:-1]) for row in rows]),
        )

    def _of_all_processes(self) -> Terms:
        """All steps' terms, [K, H] each, in two messages: sums and extremes."""
        every = {
            name: torch.stack([getattr(terms, name) for terms in self.measured])
            for name in Terms._fields
        }
        every["value"] = every["value"][:, None]
        every["ratio_min"] = -every["ratio_min"]  # the least is the largest of the opposites
        for names, together in ((SUMS, self.processes.sum_), (EXTREMES, self.processes.max_)):
            parts = [every[name] for name in names]
            summed = together(torch.cat(parts, 1)).split([part.shape[1] for part in parts], 1)
            every |= dict(zip(names, summed, strict=True))
        every["ratio_min"] = -every["ratio_min"]
        every["value"] = every["value"][:, 0]
        return Terms(**every)

    def _by_head(self, values: list[V]) -> PerHead[V]:
        names = self.space.names
        return PerHead(names, dict(zip(names, values, strict=True)))


def _head_metrics(row: list[float]) -> HeadUpdateMetrics:
    names = HeadUpdateMetrics.__annotations__
    found: HeadUpdateMetrics = HeadUpdateMetrics(**dict(zip(names, row, strict=True)))  # type: ignore[typeddict-item]
    return found


def _value_statistics(batch: SequenceBatch, processes: Processes) -> tuple[Tensor, ...]:
    """Explained variance, then mean and standard deviation of values and of returns."""
    numbers = torch.stack((batch.values, batch.returns, batch.returns - batch.values))  # [3, R, T]
    wide = numbers.double().masked_fill(~batch.valid, 0.0)
    count = batch.valid.sum().double()[None]
    total = processes.sum_(torch.cat((wide.sum((1, 2)), count)))
    count = total[3].clamp(min=1)
    mean = total[:3] / count
    centred = (wide - mean[:, None, None]).masked_fill(~batch.valid, 0.0)
    variance = processes.sum_(centred.square().sum((1, 2))) / count
    explained = torch.where(variance[1] > 0, 1 - variance[2] / variance[1].clamp(min=1e-12), 0.0)
    return explained, mean[0], variance[0].sqrt(), mean[1], variance[1].sqrt()


def _peak_memory(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
