"""Running normalisation of observations.

Shapes: `F` features.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from esper.leyline import AgreementError

CLIP = 10.0  # standard deviations; an outlier must not dominate the other features
DEFAULT_VARIANCE_FLOOR = 1e-8
# Garden features have a range of about 1. A feature that hardly changed during training must not be
# amplified on another host, where it differs, so its variance counts as at least this much.
GARDEN_VARIANCE_FLOOR = 1e-2

AllReduceSum = Callable[[Tensor], Tensor]  # sums a tensor over the processes that learn together


def local_sum(tensor: Tensor) -> Tensor:
    """Return the tensor: the sum over the processes if there is only one."""
    return tensor


class RunningNorm(nn.Module):
    """Standardise features with the mean and variance of all observed states, then clip them.

    The statistics change only in `observe`, which the agent calls after an update. Rollout and
    update therefore see the same numbers. Before the first call, states are only clipped.
    """

    mean: Tensor  # [F] float64
    variance: Tensor  # [F] float64
    count: Tensor  # [] float64, observed states
    floor: Tensor  # [] float64, smallest variance that is divided by
    scale: Tensor  # [F], derived from the statistics
    shift: Tensor  # [F], derived from the statistics

    def __init__(self, features: int) -> None:
        """Create the statistics of `features` features; 0 features disable the module."""
        super().__init__()
        self.register_buffer("mean", torch.zeros(features, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(features, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        floor = torch.full((), DEFAULT_VARIANCE_FLOOR, dtype=torch.float64)
        self.register_buffer("floor", floor)
        self.register_buffer("scale", torch.ones(features), persistent=False)
        self.register_buffer("shift", torch.zeros(features), persistent=False)
        self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            _update_scale_after_load
        )

    def forward(self, states: Tensor) -> Tensor:
        """Return standardised states [..., F] in the dtype of the input."""
        scale, shift = self.scale.to(states.dtype), self.shift.to(states.dtype)
        return torch.addcmul(shift, states, scale).clamp(-CLIP, CLIP)

    @torch.no_grad()
    def set_variance_floor(self, floor: float) -> None:
        """Set the smallest variance that features are divided by."""
        self.floor.fill_(floor)
        self._update_scale()

    @torch.no_grad()
    def observe(
        self,
        states: Tensor,
        valid: Tensor | None = None,
        all_reduce_sum: AllReduceSum = local_sum,
    ) -> None:
        """Add states to the statistics.

        Args:
            states: States, [..., F].
            valid: States that count, [...] bool; by default all of them.
            all_reduce_sum: Sums a tensor over the processes that learn together.
        """
        num_features = len(self.mean)
        if num_features == 0:
            return
        if states.ndim < 2 or states.shape[-1] != num_features:
            what, given = "Observations to normalise have the wrong shape", list(states.shape)
            raise AgreementError(what, given=given, valid=f"[..., {num_features}]")
        if valid is None:
            valid = torch.ones(states.shape[:-1], dtype=torch.bool, device=states.device)

        # Count, mean and variance of the new states of all processes.
        ignored = ~valid.flatten()[:, None]
        flat = states.flatten(0, -2).double().masked_fill(ignored, 0.0)
        sums = all_reduce_sum(torch.cat((flat.sum(0), valid.sum().double()[None])))  # [F + 1]
        new_count = sums[-1]
        new_mean = sums[:-1] / new_count.clamp(min=1)
        squares = (flat - new_mean).masked_fill(ignored, 0.0).square().sum(0)
        new_variance = all_reduce_sum(squares) / new_count.clamp(min=1)

        # Merge them with the old statistics (Chan et al. 1979).
        old_count = self.count.clone()
        self.count.add_(new_count)
        weight = new_count / self.count.clamp(min=1)
        difference = new_mean - self.mean
        between = difference**2 * weight * (old_count / self.count.clamp(min=1))
        self.variance.lerp_(new_variance, weight).add_(between)
        self.mean.add_(difference * weight)
        self._update_scale()

    @torch.no_grad()
    def _update_scale(self) -> None:
        scale = self.variance.clamp(min=self.floor).rsqrt()
        self.scale.copy_(scale)
        self.shift.copy_(-self.mean * scale)


def _update_scale_after_load(norm: RunningNorm, incompatible_keys: object) -> None:
    """Recompute scale and shift from loaded statistics.

    This is a function of the module, so that a network can be pickled.
    """
    norm._update_scale()
