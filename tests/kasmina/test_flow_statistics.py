"""What flows past a slot: each number against an obvious loop, and what it is meant to tell."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.kasmina.flow_statistics import flow_statistics
from esper.leyline.signals import FLOW_STATISTICS


def slow(h: torch.Tensor, channel_axis: int) -> list[float]:
    """One network [B, ...], number by number in float64."""
    h = h.double()
    sizes = [math.sqrt(float((sample * sample).mean()) + 1e-12) for sample in h]
    logs = [math.log(size) for size in sizes]
    mean = sum(logs) / len(logs)
    spread = math.sqrt(sum((each - mean) ** 2 for each in logs) / len(logs))
    power = sum(size * size for size in sizes) / len(sizes)
    flat = h.flatten().tolist()
    silence = sum(value * value < 1e-6 * power for value in flat) / len(flat)
    second = sum(value**2 for value in flat) / len(flat)
    peaks = math.log10((sum(value**4 for value in flat) / len(flat)) / second**2)
    others = [axis for axis in range(1, h.dim()) if axis != channel_axis]
    if not others:
        return [spread, silence, peaks, math.nan]
    lines = h.movedim(others[-1], -1).flatten(0, -2).tolist()
    steps = [(b - a) ** 2 for line in lines for a, b in pairwise(line)]
    variances = []
    for line in lines:
        middle = sum(line) / len(line)
        variances.append(sum((value - middle) ** 2 for value in line) / len(line))
    roughness = 0.5 * (sum(steps) / len(steps)) / (sum(variances) / len(variances))
    return [spread, silence, peaks, roughness]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    shape=st.sampled_from([((6, 8), 1), ((6, 3, 9), 1), ((5, 9, 3), 2), ((4, 3, 5, 6), 1)]),
)
def test_every_number_is_what_a_loop_finds(seed: int, shape: tuple[tuple[int, ...], int]) -> None:
    sizes, axis = shape
    chance = torch.Generator().manual_seed(seed)
    h = torch.randn(2, *sizes, generator=chance).relu() + 0.01 * torch.randn(
        2, *sizes, generator=chance
    )
    h[0, 0].zero_()
    found = flow_statistics(h, axis)
    assert found.shape == (2, len(FLOW_STATISTICS))
    for row, network in zip(found, h, strict=True):
        expected = torch.tensor(slow(network, axis))
        torch.testing.assert_close(row, expected.to(row), rtol=1e-3, atol=1e-3, equal_nan=True)


def test_each_number_tells_what_it_is_for() -> None:
    line = torch.linspace(0, 12.0, 40).sin().expand(1, 50, 4, 40)
    chance = torch.Generator().manual_seed(0)
    loud = line * (torch.randn(1, 50, 1, 1, generator=chance)).exp()
    order = torch.randperm(40, generator=chance)
    spikes = torch.zeros(1, 50, 4, 40)
    spikes[..., 7] = 1.0
    plain, louder, rough, sparse = (
        dict(zip(FLOW_STATISTICS, flow_statistics(each, 1)[0].tolist(), strict=True))
        for each in (line, loud, line[..., order], spikes)
    )
    assert louder["spread"] > plain["spread"] + 0.5
    assert rough["roughness"] > 5 * plain["roughness"]
    assert sparse["peaks"] > plain["peaks"] + 0.5
    assert sparse["silence"] == pytest.approx(39 / 40)
