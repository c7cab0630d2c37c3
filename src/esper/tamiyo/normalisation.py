"""Observations in comparable units. Shapes: `N` rows, `F` features."""

import torch
from torch import Tensor, nn

from esper.leyline.errors import AgreementError

CLIP = 10.0  # standard deviations; an outlier must not drown the other features
EPSILON = 1e-8


class RunningNorm(nn.Module):
    """Subtracts the mean and divides by the standard deviation of everything seen so far.

    It changes only in `observe`, which the agent calls between an update and the next rollout:
    what was decided and what is learned from it see the same numbers. Before the first time it
    only clips. Its buffers are saved with the network.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(features, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, states: Tensor) -> Tensor:
        """[..., F] in the type of the input."""
        scale = (self.variance + EPSILON).rsqrt()
        shift = (-self.mean * scale).to(states.dtype)
        return torch.addcmul(shift, states, scale.to(states.dtype)).clamp(-CLIP, CLIP)

    @torch.no_grad()
    def observe(self, states: Tensor) -> None:
        """Take states [N, F] into account."""
        if states.ndim != 2 or states.shape[1] != len(self.mean):
            raise AgreementError(
                "Observations to normalise have the wrong shape",
                given=list(states.shape),
                valid=f"[rows, {len(self.mean)}]",
            )
        if len(states) == 0:
            return
        seen = states.double()
        mean, variance = seen.mean(0), seen.var(0, correction=0)
        before, count = self.count, self.count + len(seen)
        weight = len(seen) / count
        apart = mean - self.mean
        # Chan's formula for the variance of two sets together.
        self.variance.lerp_(variance, weight).add_(apart**2 * weight * (before / count))
        self.mean.add_(apart * weight)
        self.count.copy_(count)
