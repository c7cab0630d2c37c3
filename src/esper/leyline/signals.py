"""What a controller may see: N environments between two epochs.

Nothing in here depends on which context an environment was drawn from. What was not measured is
NaN; features turn that into a zero and a flag.

Shapes: `N` environments, `S` slots, `W` epochs remembered, `H` heads, `K` statistics.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.errors import AgreementError
from esper.leyline.lifecycle import Lifecycle

SIGNAL_WINDOW = 8  # epochs of measurements that signals carry
FLOW_STATISTICS = ("spread", "silence", "peaks", "roughness")  # of activations that pass a slot


@dataclass(frozen=True)
class Signals:
    """Measurements and lifecycle of every environment, before a decision."""

    catalogue: BlueprintCatalogue  # what may be planted, and its cost
    lifecycle: Lifecycle
    budget: Tensor  # [N] int64 parameters that may exist in seeds at most
    horizon: Tensor  # [N] int64 epochs of the whole episode
    classes: int
    train_loss: Tensor  # [N, W] the latest epoch last
    validation_loss: Tensor  # [N, W] of the network as it is
    validation_accuracy: Tensor  # [N, W] percent
    committed_accuracy: Tensor  # [N, W] percent, with only fossilized seeds on
    host_gradient: Tensor  # [N] root mean square of the gradient norm over the last epoch
    draws: Tensor  # [N, H] from 0 to 1: each environment's own random numbers for this decision
    flow: Tensor | None = None  # [N, S, K] FLOW_STATISTICS of each slot; None: never measured

    def __post_init__(self) -> None:
        hosts = self.lifecycle.shape[0]
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and value.shape[0] != hosts:
                raise AgreementError(
                    f"Signals disagree on the number of environments in {field.name!r}",
                    given=f"{value.shape[0]}, the lifecycle has {hosts}",
                )

    def __len__(self) -> int:
        return self.lifecycle.shape[0]

    @property
    def chance(self) -> float:
        """The accuracy of guessing, in percent."""
        return 100.0 / self.classes

    def rows(self, index: Tensor) -> "Signals":
        """The environments in `index`, in that order."""
        arrays = {
            field.name: getattr(self, field.name)[index]
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return replace(self, lifecycle=self.lifecycle.rows(index), **arrays)

    def latest(self, name: str) -> Tensor:
        """[N]: the last measurement of a series; NaN before the first epoch."""
        series: Tensor = getattr(self, name)
        return series[:, -1]


def empty_window(hosts: int) -> Tensor:
    """[N, W] with nothing measured yet."""
    return torch.full((hosts, SIGNAL_WINDOW), torch.nan, dtype=torch.float64)
