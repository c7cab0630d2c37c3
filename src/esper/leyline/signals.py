"""What a controller may see: N environments between two epochs.

Nothing in here depends on which context an environment was drawn from. What was not measured is
NaN; features turn that into a zero and a flag.

Shapes: `N` environments, `S` slots, `W` epochs remembered, `H` heads, `K` statistics.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.constants import DEFAULT_RENT
from esper.leyline.lifecycle import Lifecycle
from esper.leyline.shadows import ShadowReadings

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
    shadows: ShadowReadings | None = None  # None: none can train here
    rent: float = DEFAULT_RENT  # points that 100 % of the host's parameters cost

    def __len__(self) -> int:
        return self.lifecycle.shape[0]

    @property
    def chance(self) -> float:
        """The accuracy of guessing, in percent."""
        return 100.0 / self.classes

    def rows(self, index: Tensor) -> "Signals":
        """The environments in `index`, in that order."""
        arrays = {name: array[index] for name, array in _arrays(self).items()}
        shadows = None if self.shadows is None else self.shadows.rows(index)
        return replace(self, lifecycle=self.lifecycle.rows(index), shadows=shadows, **arrays)

    def to(self, device: torch.device) -> "Signals":
        """On that device, where features of many environments are computed; without shadows."""
        if device.type == "cpu":
            return self

        def there(of: "Signals | Lifecycle") -> dict[str, Any]:
            return {n: each.to(device, non_blocking=True) for n, each in _arrays(of).items()}

        life = replace(self.lifecycle, **there(self.lifecycle))
        return replace(self, lifecycle=life, shadows=None, **there(self))

    def latest(self, name: str) -> Tensor:
        """[N]: the last measurement of a series; NaN before the first epoch."""
        series: Tensor = getattr(self, name)
        return series[:, -1]


def _arrays(of: Signals | Lifecycle) -> dict[str, Any]:
    return {name: each for name, each in vars(of).items() if isinstance(each, Tensor)}


SERIES = ("train_loss", "validation_loss", "validation_accuracy", "committed_accuracy")


class SignalWindow:
    """What signals remember of N environments, whether a population or one wrapped model."""

    def __init__(self, hosts: int, slots: int) -> None:
        nothing = torch.full((hosts,), torch.nan, dtype=torch.float64)
        self._series = {
            name: nothing[:, None].repeat(1, SIGNAL_WINDOW) for name in SERIES
        }  # [N, W] each
        self._host_gradient = nothing  # [N]
        self._flow = nothing[:, None, None].repeat(1, slots, len(FLOW_STATISTICS))  # [N, S, K]

    def clear(self, rows: Tensor) -> None:
        """Forget all of these environments: a new episode starts there."""
        for array in (*self._series.values(), self._host_gradient, self._flow):
            array[rows] = torch.nan

    def latest(self, name: str) -> Tensor:
        """[N]: the last measurement of a series; NaN before the first epoch."""
        return self._series[name][:, -1]

    def recent(self, name: str, epochs: int) -> Tensor:
        """[N, epochs]: the last measurements of a series, the latest last."""
        return self._series[name][:, -epochs:].clone()

    def loss_rise(self, train_loss: Tensor) -> Tensor:
        """[N]: by which share this loss is above that of the last epoch; NaN: not to be said."""
        before = self.latest("train_loss")
        return torch.where(before > 0.0, train_loss / before - 1.0, torch.nan)

    def remember(
        self, latest: Mapping[str, Tensor], host_gradient: Tensor, where: Tensor | None = None
    ) -> None:
        """Append an epoch's numbers [N], by the names of `SERIES`; `where` [N]: only these."""
        kept = torch.ones(len(host_gradient), dtype=torch.bool) if where is None else where
        for name in SERIES:
            series = self._series[name].roll(-1, dims=1)
            series[:, -1] = latest[name]
            self._series[name] = torch.where(kept[:, None], series, self._series[name])
        self._host_gradient = torch.where(kept, host_gradient, self._host_gradient)

    def remember_flow(self, flow: Tensor, where: Tensor | None = None) -> None:
        """What passed the slots when last measured, [N, S, K]."""
        kept = torch.tensor(True) if where is None else where[:, None, None]
        self._flow = torch.where(kept, flow, self._flow)

    def measured(self) -> dict[str, Any]:
        """A copy of all that was measured, as the fields of `Signals`."""
        arrays = {**self.state_dict(), "flow": self._flow}
        return {name: array.clone() for name, array in arrays.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """All but what passed the slots, which is measured before every decision that sees it."""
        return {**self._series, "host_gradient": self._host_gradient}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._series = {name: state[name].clone() for name in SERIES}
        self._host_gradient = state["host_gradient"].clone()
