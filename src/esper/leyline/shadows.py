"""What shadows show: seeds that learn beside a host without being planted, and never seen by it.

Losses are so that guessing is log(classes), as in `Signals`. What was not measured is NaN.

Shapes: `N` environments, `S` slots, `P` blueprints.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

MEASURED = ("gain", "error", "slope", "train_gain", "gradient")


@dataclass(frozen=True)
class ShadowReadings:
    """The last measurement of every shadow that ever trained in these episodes."""

    epochs: Tensor  # [N, S, P] passes over the training data that it has learned from; 0: none
    gain: Tensor  # [N, S, P] validation loss without it minus with it
    error: Tensor  # [N, S, P] standard error of the gain, paired over validation samples
    slope: Tensor  # [N, S, P] by how much the gain rose per epoch since it was measured before
    train_gain: Tensor  # [N, S, P] as the gain, on training batches before it learned from them
    gradient: Tensor  # [N, S, P] root mean square of its gradient's norm over the host's
    cost: Tensor  # [N, S, P] FLOPs to train and measure it for an epoch, over those of the host's

    @classmethod
    def none(cls, hosts: int, cost: Tensor) -> "ShadowReadings":
        """Of no shadow yet; `cost` [S, P]."""
        costs = cost.double().expand(hosts, *cost.shape).clone()
        unknown = {name: torch.full_like(costs, torch.nan) for name in MEASURED}
        return cls(epochs=torch.zeros_like(costs), cost=costs, **unknown)

    @property
    def t(self) -> Tensor:
        """[N, S, P]: gains in units of their errors; -inf where nothing was measured."""
        found = self.gain / self.error.clamp(min=torch.finfo(torch.float64).tiny)
        return found.nan_to_num(-torch.inf, torch.inf, -torch.inf)

    def bound(self, errors: float) -> Tensor:
        """[N, S, P]: gains with so many errors added; -inf where nothing was measured."""
        return (self.gain + errors * self.error).nan_to_num(-torch.inf)

    def rows(self, index: Tensor) -> "ShadowReadings":
        """The environments in `index`, in that order."""
        return ShadowReadings(**{name: array[index] for name, array in self.arrays().items()})

    def arrays(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def updated(self, where: Tensor, epochs: Tensor, **found: Tensor) -> "ShadowReadings":
        """With what was measured of the shadows in `where` [N, S, P], after so many epochs of
        learning in all; `found` has all of `MEASURED` but the slope, [N, S, P] each.
        """
        since = epochs - torch.where(self.gain.isnan(), 0.0, self.epochs)
        rise = found["gain"] - self.gain.nan_to_num(0.0)  # a newborn is nothing
        found = {"epochs": epochs, "slope": rise / since, **found}
        now = {name: torch.where(where, each, getattr(self, name)) for name, each in found.items()}
        return ShadowReadings(**self.arrays() | now)


class AuditionPlan(NamedTuple):
    """Which shadows train in the coming epoch. All others are given up."""

    where: Tensor  # [N, S, P] bool
    share: Tensor  # [N] float64 of the epoch's samples that they train on, from 0 to 1
