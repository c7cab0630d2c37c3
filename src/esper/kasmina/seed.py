"""A seed: a blueprint's body, the layout it works in and, for the gate blend, its learned gate."""

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import Blueprint
from esper.kasmina.isolation import randomness_kept, state_kept
from esper.leyline.errors import BlueprintError
from esper.leyline.ops import Blend
from esper.leyline.slots import SlotSpec
from esper.leyline.streams import derive_seed


class BlendGate(nn.Module):
    """A learned factor at each position, 2 * sigmoid(w . h + b): 1 when new, between 0 and 2.

    It sees one position at a time, so it is causal and fits every layout.
    """

    def __init__(self, channels: int, channel_axis: int) -> None:
        super().__init__()
        self.channel_axis = channel_axis
        self.weight = nn.Parameter(torch.zeros(channels))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        score = h.movedim(self.channel_axis, -1) @ self.weight + self.bias
        return 2.0 * torch.sigmoid(score).unsqueeze(self.channel_axis)


class Seed(nn.Module):
    """g in h + alpha * g(h), in the host's own layout."""

    def __init__(
        self,
        spec: SlotSpec,
        body: nn.Module,
        gate: BlendGate | None,
        *,
        draws: bool = False,
        fixed_extent: bool = False,
    ) -> None:
        super().__init__()
        self.body = body
        self.gate = gate
        self.draws = draws  # random numbers, for dropout say
        self.fixed_extent = fixed_extent  # do its weights depend on the slot's extent?
        straight = spec.to_canonical == tuple(range(len(spec.to_canonical)))
        self.permutation = None if straight else (spec.to_canonical, spec.from_canonical)

    def forward(self, h: Tensor) -> Tensor:
        if self.permutation is not None:
            h = h.permute(self.permutation[0])
        g: Tensor = self.body(h)
        if self.gate is not None:
            g = g * self.gate(h)
        if self.permutation is not None:
            g = g.permute(self.permutation[1])
        return g


def build_seed(
    plan: Blueprint,
    spec: SlotSpec,
    blend: Blend,
    *,
    stream: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Seed:
    """A newborn seed, checked to be exactly nothing.

    It is drawn on the CPU from its own stream, so that planting leaves the host's random
    numbers alone and gives the same seed on every device.
    """
    with torch.device("cpu"), randomness_kept(stream=derive_seed(stream, "weights")):
        body = plan.build(spec)
        draws = _require_zero_point(plan, spec, body)
    gate = BlendGate(spec.channels, spec.channel_axis) if blend is Blend.GATE else None
    seed = Seed(spec, body, gate, draws=draws, fixed_extent=plan.fixed_extent)
    return seed.to(device=device, dtype=dtype)


def _require_zero_point(plan: Blueprint, spec: SlotSpec, body: nn.Module) -> bool:
    """Raise unless the newborn body returns zeros; says whether it draws random numbers."""
    h = torch.randn(spec.canonical_shape(batch=2))
    before = torch.get_rng_state()
    with state_kept(body), torch.no_grad():
        output = body(h)
    if bool((output != 0).any()):  # also true of NaN
        raise BlueprintError(
            f"Blueprint {plan.name!r} is not zero when it is new",
            given=f"outputs up to {float(output.abs().max()):.3g}",
            valid="exactly 0 everywhere",
            fix="end it with zeroed(layer) and nothing after, or with a ScalarGate",
        )
    return not torch.equal(before, torch.get_rng_state())
