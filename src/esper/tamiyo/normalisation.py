"""Observations in comparable units. Shapes: `...` any, `F` features."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from esper.leyline.errors import AgreementError

CLIP = 10.0  # standard deviations; an outlier must not drown the other features
EPSILON = 1e-8
# Of features that are made to span about 1: what hardly ever changed while learning must not be
# blown up where it differs, as costs do on another host.
GARDEN_FLOOR = 1e-2

Summed = Callable[[Tensor], Tensor]  # adds a tensor up over the processes that learn together


def alone(tensor: Tensor) -> Tensor:
    """The sum over the processes where there is only one."""
    return tensor


class RunningNorm(nn.Module):
    """Subtracts the mean and divides by the standard deviation of everything seen so far.

    It changes only in `observe`, which the agent calls between an update and the next rollout:
    what was decided and what is learned from it see the same numbers. Before the first time it
    only clips. Its buffers are saved with the network.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor
    floor: Tensor  # the smallest variance that is divided by

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(features, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("floor", torch.full((), EPSILON, dtype=torch.float64))

    def forward(self, states: Tensor) -> Tensor:
        """[..., F] in the type of the input."""
        scale = self.variance.clamp(min=self.floor).rsqrt()
        shift = (-self.mean * scale).to(states.dtype)
        return torch.addcmul(shift, states, scale.to(states.dtype)).clamp(-CLIP, CLIP)

    @torch.no_grad()
    def observe(self, states: Tensor, valid: Tensor | None = None, summed: Summed = alone) -> None:
        """Take states [..., F] into account, all or the `valid` [...] ones, of all processes."""
        if states.ndim < 2 or states.shape[-1] != len(self.mean):
            raise AgreementError(
                "Observations to normalise have the wrong shape",
                given=list(states.shape),
                valid=f"[..., {len(self.mean)}]",
            )
        if valid is None:
            valid = torch.ones(states.shape[:-1], dtype=torch.bool, device=states.device)
        left_out = ~valid.flatten()[:, None]
        seen = states.flatten(0, -2).double().masked_fill(left_out, 0.0)
        total = summed(torch.cat((seen.sum(0), valid.sum().double()[None])))  # [F + 1]
        news = total[-1]
        mean = total[:-1] / news.clamp(min=1)
        centred = (seen - mean).masked_fill(left_out, 0.0)
        variance = summed(centred.square().sum(0)) / news.clamp(min=1)
        before, count = self.count, self.count + news
        weight = news / count.clamp(min=1)
        apart = mean - self.mean
        # Chan's formula for the variance of two sets together.
        self.variance.lerp_(variance, weight).add_(
            apart**2 * weight * (before / count.clamp(min=1))
        )
        self.mean.add_(apart * weight)
        self.count.copy_(count)
