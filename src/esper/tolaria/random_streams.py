"""Random streams for a whole population at once, without state.

Every draw is a hash of (environment's seed, purpose, step, position): environment 7 draws the same
numbers alone, among 64 others, on a CPU and on a GPU, and nothing has to be saved to go on.
Only whole-number arithmetic that wraps around is used, so the draws are equal to the bit. They are
made on the device of the seeds, or on another from what few operations have made of the seeds.

Shapes: `N` environments.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.leyline.errors import DataError
from esper.leyline.settings import COUNT, require
from esper.leyline.slots import require_form
from esper.leyline.streams import derive_seed

# The constants and shifts of splitmix64 (Steele, Lea and Flood, 2014), as signed numbers.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
SHIFTS = (30, 27, 31)
WORD = 64  # bits of a key
FRACTION_BITS = 53  # that a number below 1 can hold exactly

Part = int | str | Tensor


def fold(seeds: Tensor, *parts: Part) -> Tensor:
    """New seeds [N] from seeds [N] and names, whole numbers or one whole number for each, [N]."""
    what = "Random streams start from one seed for each environment"
    require_form(what, seeds, (seeds.numel(),), torch.int64, error=DataError)
    for part in parts:
        number = derive_seed("stream", part) if isinstance(part, str) else part
        if isinstance(number, Tensor):
            number = number.to(seeds.device)
        seeds = _mix(_mix(seeds + GOLDEN) + number)
    return seeds


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """From where they are copied to that device without waiting for what it has still to do."""
    return values.pin_memory() if device.type == "cuda" and values.is_cpu else values


def sent(values: Tensor, device: torch.device) -> Tensor:
    """On that device, copied without waiting."""
    return pinned(values, device).to(device, non_blocking=True)


def keys(seeds: Tensor, purpose: str, step: int | Tensor, count: int) -> Tensor:
    """Random bits [N, count] int64; row i depends on its own seed, the purpose and the step.

    `step` is one number for all, or one for each environment, [N]. More are drawn by a larger
    `count`, which leaves the first ones as they are.
    """
    require("How many numbers a random stream gives", count, COUNT, error=DataError)
    return _keys(fold(seeds, purpose, step), count)


def _keys(rows: Tensor, count: int) -> Tensor:
    return _mix(rows[:, None] + _positions(count, rows.device))


def uniform(seeds: Tensor, purpose: str, step: int | Tensor, count: int) -> Tensor:
    """Random numbers [N, count] float64, at least 0 and below 1."""
    return _fractions(keys(seeds, purpose, step, count))


def uniform_groups(
    groups: Sequence[tuple[Tensor, int]], purpose: str, step: int, device: torch.device
) -> list[Tensor]:
    """What `uniform` draws of each (seeds [K], count), on a device, in a few operations for all."""
    seeds = sent(fold(torch.cat([seeds for seeds, _ in groups]), purpose, step), device)
    rows = seeds.split([len(seeds) for seeds, _ in groups])
    sizes = [(len(seeds), count) for seeds, count in groups]
    positions = _positions(max(count for _, count in sizes), device)
    words = [own[:, None] + positions[: size[1]] for own, size in zip(rows, sizes, strict=True)]
    drawn = _fractions(_mix(torch.cat([each.flatten() for each in words])))
    parts = drawn.split([each.numel() for each in words])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


def _positions(count: int, device: torch.device) -> Tensor:
    return _mix(torch.arange(count, device=device) * GOLDEN)


def _fractions(words: Tensor) -> Tensor:
    return _shifted(words, WORD - FRACTION_BITS).double() * 2.0**-FRACTION_BITS


def orders(
    seeds: Tensor, step: int | Tensor, samples: int, needed: int, device: torch.device | None = None
) -> Tensor:
    """Which samples each environment sees in which order at a step, [N, needed] int64.

    Consecutive steps walk through one permutation until it cannot fill a step, then through a
    fresh one, so a step does not repeat a sample. Where more are needed than there are samples,
    every step has fresh permutations, one after the other.
    """
    require("The number of samples to put in order", samples, COUNT, error=DataError)
    require("The number of samples needed", needed, COUNT, error=DataError)
    steps_in_one = max(1, samples // needed)
    turn, place = step // steps_in_one, step % steps_in_one
    cycles = -(-needed // samples)
    rows = sent(fold(seeds, "order", turn), device or seeds.device)
    drawn = _keys(rows, cycles * samples).view(-1, cycles, samples)
    # The sample's number is in the low bits: no two keys are equal, so that every device and
    # every sorting method gives the same order.
    low = (1 << (samples - 1).bit_length()) - 1
    drawn = drawn.bitwise_and_(~low).bitwise_or_(torch.arange(samples, device=drawn.device))
    ranked = drawn.sort(dim=-1).values.view(len(drawn), -1)
    if isinstance(place, int):
        return ranked[:, place * needed : (place + 1) * needed] & low
    first = sent(place, ranked.device)[:, None] * needed
    return ranked.gather(1, first + torch.arange(needed, device=ranked.device)) & low


def _mix(words: Tensor) -> Tensor:
    """A bijection of 64-bit words in which every bit of the result depends on every bit given."""
    words = words ^ _shifted(words, SHIFTS[0])
    words *= FACTORS[0]
    words ^= _shifted(words, SHIFTS[1])
    words *= FACTORS[1]
    words ^= _shifted(words, SHIFTS[2])
    return words


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shifted right with zeros from the left; torch would repeat the sign."""
    return (words >> bits).bitwise_and_((1 << (WORD - bits)) - 1)
