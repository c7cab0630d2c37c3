"""Random streams: good draws, the same for any population, and permutations."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from esper.leyline.errors import DataError
from esper.leyline.streams import derive_seed
from esper.tolaria import random_streams
from esper.tolaria.random_streams import (
    GOLDEN,
    _mix,
    fold,
    keys,
    orders,
    uniform,
    uniform_groups,
)

SEEDS = torch.arange(64)  # neighbours on purpose: the worst that a caller can do


class Count(TorchDispatchMode):
    """Counts the operations that torch carries out."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operations += 1
        return func(*args, **(kwargs or {}))


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def chi_square(counts: Tensor) -> float:
    """In standard deviations from what equally likely outcomes give."""
    expected = counts.sum() / counts.numel()
    value = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.numel() - 1
    return (value - freedom) / math.sqrt(2 * freedom)


def test_the_mixing_is_that_of_splitmix64() -> None:
    # The first numbers of the reference implementation in C, started at 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    words = _mix(1234567 + torch.arange(1, 4) * GOLDEN)
    assert [word % (1 << 64) for word in words.tolist()] == published


def mixed(word: int) -> int:
    """The same mixing in Python's own numbers, kept to 64 bits."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    word = (word ^ word >> 27) * 0x94D049BB133111EB % (1 << 64)
    return word ^ word >> 31


@given(
    seed=st.integers(-(2**63), 2**63 - 1), step=st.integers(0, 2**40), purpose=st.text(max_size=4)
)
def test_a_key_is_a_hash_of_seed_purpose_step_and_position(
    seed: int, step: int, purpose: str
) -> None:
    row = seed % (1 << 64)
    for part in (derive_seed("stream", purpose), step):
        row = mixed((mixed((row + GOLDEN) % (1 << 64)) + part) % (1 << 64))
    expected = [mixed((row + mixed(at * GOLDEN % (1 << 64))) % (1 << 64)) for at in range(3)]
    drawn = keys(torch.tensor([seed]), purpose, step, 3)[0].tolist()
    assert [key % (1 << 64) for key in drawn] == expected


def test_draws_never_change_between_releases() -> None:
    seeds = torch.tensor([0, 7])
    assert keys(seeds, "order", 3, 2).tolist() == [
        [-8646040822084755090, 1035173032849504062],
        [3945165463843561875, -156030944034936002],
    ]
    assert orders(seeds, 3, 6, 8).tolist() == [[3, 0, 2, 1, 5, 4, 5, 4], [2, 1, 4, 3, 0, 5, 2, 5]]
    assert uniform(seeds[1:], "weights", 0, 2).tolist() == [
        [0.7332185713356218, 0.3718567840763949]
    ]
    assert fold(seeds[1:], "a", 1).tolist() == [-7382312805102214179]


@given(
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9),
    step=st.integers(0, 10**6),
    count=st.integers(1, 40),
    data=st.data(),
)
def test_a_row_depends_on_its_own_seed_alone(
    seeds: list[int], step: int, count: int, data: st.DataObject
) -> None:
    row = data.draw(st.integers(0, len(seeds) - 1))
    many, one = torch.tensor(seeds), torch.tensor([seeds[row]])
    for draw in (keys, uniform):
        assert torch.equal(draw(many, "x", step, count)[row], draw(one, "x", step, count)[0])
    assert torch.equal(orders(many, step, 17, count)[row], orders(one, step, 17, count)[0])


@given(sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=1, max_size=5))
def test_groups_drawn_together_are_what_each_draws_alone(sizes: list[tuple[int, int]]) -> None:
    groups = [(fold(SEEDS[:rows], place), n) for place, (rows, n) in enumerate(sizes)]
    together = uniform_groups(groups, "x", 3, SEEDS.device)
    for drawn, (seeds, count) in zip(together, groups, strict=True):
        assert torch.equal(drawn, uniform(seeds, "x", 3, count))


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    assert torch.equal(keys(SEEDS, "x", 1, 50)[:, :7], keys(SEEDS, "x", 1, 7))


def test_every_environment_may_be_at_a_step_of_its_own() -> None:
    steps = torch.arange(64) % 5
    for draw in (
        lambda seeds, step: keys(seeds, "x", step, 6),
        lambda seeds, step: orders(seeds, step, 20, 7),
        lambda seeds, step: orders(seeds, step, 5, 12),
    ):
        mixed = draw(SEEDS, steps)
        for step in range(5):
            assert torch.equal(mixed[steps == step], draw(SEEDS[steps == step], step))


def test_uniform_numbers_fill_the_interval_evenly() -> None:
    draws = uniform(SEEDS, "x", 0, 4000)
    assert draws.dtype == torch.float64
    assert draws.min() >= 0
    assert draws.max() < 1
    assert float(draws.double().mean()) == pytest.approx(1 / 2, abs=0.002)
    assert float(draws.double().var()) == pytest.approx(1 / 12, abs=0.001)
    assert abs(chi_square((draws * 1000).long().flatten().bincount(minlength=1000))) < 4
    each = [chi_square((row * 50).long().bincount(minlength=50)) for row in draws]
    assert max(map(abs, each)) < 5


def test_the_largest_key_is_still_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([[0, -1]])  # no bit set, every bit set
    monkeypatch.setattr(random_streams, "keys", lambda *_: ends)
    low, high = uniform(SEEDS, "x", 0, 2)[0].tolist()
    assert low == 0
    assert 1 - 1e-6 < high < 1


def test_every_bit_of_a_key_is_set_half_of_the_time() -> None:
    drawn = keys(SEEDS, "x", 0, 4000).flatten()
    for bit in range(64):
        share = float((drawn >> bit & 1).double().mean())
        assert share == pytest.approx(0.5, abs=0.005)


def test_neighbouring_environments_steps_positions_and_purposes_are_unrelated() -> None:
    here = uniform(SEEDS, "x", 5, 4000)
    others = {
        "environment": uniform(SEEDS + 1, "x", 5, 4000),
        "step": uniform(SEEDS, "x", 6, 4000),
        "purpose": uniform(SEEDS, "y", 5, 4000),
        "position": here.roll(1, dims=1),
        "environment and position": uniform(SEEDS + 1, "x", 5, 4000).roll(1, dims=1),
        "environment and step": uniform(SEEDS + 1, "x", 4, 4000),
    }
    for what, there in others.items():
        assert abs(correlation(here, there)) < 0.01, what
    rows = torch.corrcoef(here) - torch.eye(64)
    assert float(rows.abs().max()) < 0.08


def test_one_bit_of_a_seed_changes_half_of_the_bits_of_a_new_one() -> None:
    before = fold(SEEDS, "x", 1)
    for bit in range(63):
        changed = before ^ fold(SEEDS ^ (1 << bit), "x", 1)
        flips = sum((changed >> at & 1) for at in range(64)).double()
        assert float(flips.mean()) == pytest.approx(32, abs=2.5)


def test_folding_tells_names_numbers_and_their_order_apart() -> None:
    parts = [("a",), ("b",), (0,), (1,), (-1,), ("a", 1), (1, "a"), ("1",), ("a", "b"), ("b", "a")]
    folded = torch.cat([fold(SEEDS, *part) for part in parts])
    assert len(folded.unique()) == len(parts) * len(SEEDS)
    assert torch.equal(fold(SEEDS, "a", 1), fold(fold(SEEDS, "a"), 1))


def test_no_two_keys_of_many_streams_are_equal() -> None:
    drawn = torch.cat([keys(SEEDS, name, step, 500) for name in "ab" for step in range(10)])
    assert len(drawn.unique()) == drawn.numel()


@given(samples=st.integers(1, 60), needed=st.integers(1, 150), step=st.integers(0, 50))
def test_an_order_is_made_of_whole_permutations(samples: int, needed: int, step: int) -> None:
    order = orders(SEEDS[:3], step, samples, needed)
    assert order.shape == (3, needed)
    assert order.dtype == torch.int64
    for row in order:
        for cycle in row.split(samples):
            assert len(cycle.unique()) == len(cycle)
            assert int(cycle.min()) >= 0
            assert int(cycle.max()) < samples


@pytest.mark.parametrize(("samples", "needed"), [(12, 4), (12, 12), (13, 4), (12, 7)])
def test_steps_go_through_a_permutation_before_a_fresh_one(samples: int, needed: int) -> None:
    steps = samples // needed  # that one permutation fills
    passes = [
        torch.cat([orders(SEEDS, start + step, samples, needed) for step in range(steps)], dim=1)
        for start in range(0, 4 * steps, steps)
    ]
    for seen in passes:
        assert all(len(row.unique()) == len(row) for row in seen)
    assert not torch.equal(passes[0], passes[1])


def test_cycles_of_one_step_differ() -> None:
    first, second = orders(SEEDS, 0, 50, 100).split(50, dim=1)
    assert not (first == second).all(1).any()


def test_all_permutations_are_equally_likely() -> None:
    order = orders(torch.arange(24_000), 0, 4, 4)
    named = (order * torch.tensor([64, 16, 4, 1])).sum(1)
    counts = named.unique(return_counts=True)[1]
    assert len(counts) == 24
    assert abs(chi_square(counts.double())) < 4


def test_a_sample_is_equally_likely_at_every_place() -> None:
    order = orders(torch.arange(20_000), 3, 10, 10)
    places = torch.stack([order[:, place].bincount(minlength=10) for place in range(10)])
    assert abs(chi_square(places.double())) < 4


@pytest.mark.parametrize(
    "draw",
    [
        lambda seeds: keys(seeds, "x", 0, 50),
        lambda seeds: uniform(seeds, "x", 0, 50),
        lambda seeds: orders(seeds, 0, 50, 120),
    ],
    ids=["keys", "uniform", "orders"],
)
def test_a_larger_population_needs_no_more_operations(draw) -> None:  # type: ignore[no-untyped-def]
    one = SEEDS[:1]
    with Count() as alone:
        draw(one)
    with Count() as many:
        draw(SEEDS)
    assert many.operations == alone.operations
    assert many.operations < 100


def test_seeds_are_left_as_they_were() -> None:
    seeds = SEEDS.clone()
    keys(seeds, "x", 1, 5)
    orders(seeds, 1, 5, 5)
    assert torch.equal(seeds, SEEDS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same() -> None:
    for draw in (
        lambda device: keys(SEEDS.to(device), "x", 3, 500),
        lambda device: uniform(SEEDS.to(device), "x", 3, 500),
        lambda device: orders(SEEDS.to(device), 3, 4000, 2000),
        lambda device: orders(SEEDS.to(device), SEEDS % 3, 300, 700),
    ):
        assert torch.equal(draw("cuda").cpu(), draw("cpu"))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: keys(SEEDS.int(), "x", 0, 1),
            "seed for each environment; .*valid: torch.int64 ",
        ),
        (
            lambda: keys(SEEDS[:, None], "x", 0, 1),
            "seed for each environment; .*valid: torch.int64 ",
        ),
        (lambda: keys(SEEDS, "x", 0, 0), "numbers .* given: 0; valid: a whole number from 1"),
        (lambda: orders(SEEDS, 0, 0, 5), "samples to put in order .* given: 0"),
        (lambda: orders(SEEDS, 0, 5, 0), "samples needed .* given: 0"),
    ],
)
def test_impossible_draws_are_refused(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match=words):
        call()
