"""The generators: shapes, determinism, and the facts that make each family what it is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.garden import FAMILIES, Source
from esper.garden.families import (
    HALF,
    LENGTH,
    QUARTER,
    noisy_labels,
    spikes,
)
from esper.leyline.errors import DataError, UnknownNameError
from esper.tolaria.data.splits import Split

every_family = pytest.mark.parametrize("family", list(FAMILIES))


@every_family
def test_a_source_loads_three_splits_of_lines_with_ten_classes(family: str) -> None:
    splits = Source(family=family, samples=300).load()
    assert splits.classes == 10
    for name, samples in (("train", 300), ("validation", 1000), ("test", 2000)):
        inputs, labels = splits.named()[name]
        assert inputs.shape == (samples, LENGTH)
        assert inputs.dtype == torch.float32
        assert labels.shape == (samples,)


@every_family
def test_equal_sources_load_equal_data_and_leave_the_global_stream_alone(family: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    prints = {Source(family=family, samples=50).load().fingerprint() for _ in range(2)}
    assert len(prints) == 1
    assert torch.equal(before, torch.get_rng_state())


@every_family
def test_another_seed_has_other_samples(family: str) -> None:
    first, second = (Source(family=family, samples=50, seed=seed).load() for seed in (0, 1))
    for name in ("train", "validation", "test"):
        assert not torch.equal(first.named()[name].inputs, second.named()[name].inputs)


@every_family
def test_no_sample_is_in_two_splits(family: str) -> None:
    splits = Source(family=family, samples=2000).load()
    lines = torch.cat([split.inputs for split in splits.named().values()])
    assert len(lines.unique(dim=0)) == len(lines)


@every_family
def test_classes_are_balanced(family: str) -> None:
    classes = FAMILIES[family].classes
    counts = Source(family=family, samples=200).load().train.labels.bincount()
    assert counts.tolist() == [200 // classes] * classes


# --- glyphs --------------------------------------------------------------------------------


def _train(**settings: object) -> Split:
    return Source(samples=200, **settings).load().train  # type: ignore[arg-type]


def test_a_gain_multiplies_each_sample_by_its_own_factor() -> None:
    plain, gained = _train(family="gain", gain=0), _train(family="gain", gain=2)
    ratio = gained.inputs / plain.inputs
    factors = ratio.median(dim=1).values
    torch.testing.assert_close(gained.inputs, plain.inputs * factors[:, None], rtol=1e-4, atol=1e-5)
    logs = factors.log()
    assert float(logs.abs().max()) <= 2.001
    assert float(logs.std()) == pytest.approx(2 / 3**0.5, rel=0.15)  # of a uniform from -2 to 2


def test_gains_differ_in_strength_and_in_nothing_else() -> None:
    plain, weak, strong = (
        Source(family="gain", samples=50, gain=gain).load().train.inputs for gain in (0.0, 1.0, 2.0)
    )
    torch.testing.assert_close(weak.square(), plain * strong)


def test_shuffling_moves_points_the_same_way_in_every_sample_and_split() -> None:
    first, second = (Source(family="shuffled", samples=50, order=order).load() for order in (0, 1))
    columns = [_matches(a.inputs, b.inputs) for a, b in _pairs(first, second)]
    assert sorted(columns[0]) == list(range(LENGTH))
    assert columns[0] != list(range(LENGTH))
    assert columns[0] == columns[1] == columns[2]


def _pairs(first: object, second: object) -> list[tuple[Split, Split]]:
    return list(zip(first.named().values(), second.named().values(), strict=True))  # type: ignore[attr-defined]


def _matches(ours: Tensor, theirs: Tensor) -> list[int]:
    """For each column of ours, the equal one of theirs."""
    same = (ours[:, :, None] == theirs[:, None, :]).all(dim=0)
    return same.int().argmax(dim=1).tolist()


def test_a_fixed_glyph_does_not_move() -> None:
    quiet = {"noise": 0, "amplitude": 0}
    fixed = Source(family="fixed", samples=400, **quiet).load().train  # type: ignore[arg-type]
    moved = Source(family="mnist1d", samples=400, **quiet).load().train  # type: ignore[arg-type]

    def spread(split: Split) -> float:
        return float(split.inputs[split.labels == 0].var(dim=0).mean())

    assert spread(fixed) < 0.5 * spread(moved)


# --- the long-range rule -------------------------------------------------------------------


@given(seed=st.integers(0, 2**40), noise=st.floats(0, 0.1))
@settings(max_examples=20, deadline=None)
def test_the_class_can_be_read_off_the_two_spikes(seed: int, noise: float) -> None:
    inputs, labels = spikes(100, seed, {"noise": noise})
    halves = inputs.view(100, 2, HALF)
    places = halves.abs().argmax(dim=2)  # [M, 2]
    signs = halves.gather(2, places[:, :, None])[:, :, 0] > 0
    outer = places >= QUARTER
    assert torch.equal(labels, 2 * (signs[:, 0] ^ signs[:, 1]) + (outer[:, 0] ^ outer[:, 1]))


def test_one_half_says_nothing_about_the_class() -> None:
    inputs, labels = spikes(8000, 0, {"noise": 0.0})
    for half in inputs.view(8000, 2, HALF).unbind(1):
        kind = 2 * (half.sum(dim=1) > 0) + (half.abs().argmax(dim=1) >= QUARTER)
        table = torch.zeros(4, 4).index_put_((kind, labels), torch.ones(8000), accumulate=True)
        assert float((table / 500 - 1).abs().max()) < 0.2


def test_a_spike_lies_anywhere_in_its_quarter() -> None:
    inputs, _ = spikes(4000, 0, {"noise": 0.0})
    counts = (inputs != 0).sum(dim=0)
    assert int(counts.sum()) == 8000
    assert int(counts.min()) > 120  # 200 are expected


# --- label noise ---------------------------------------------------------------------------


def test_a_share_of_the_labels_is_drawn_anew_in_all_three_splits() -> None:
    clean = Source(family="mnist1d", samples=2000).load()
    noisy = Source(family="mnist1d", samples=2000, label_noise=0.6).load()
    for a, b in _pairs(clean, noisy):
        assert torch.equal(a.inputs, b.inputs)
        # A tenth of what is drawn anew is drawn as it was.
        assert float((a.labels != b.labels).float().mean()) == pytest.approx(0.54, abs=0.04)


def test_noise_keeps_to_the_classes_that_occur() -> None:
    labels = Source(family="xor", samples=400, label_noise=0.9).load().train.labels
    assert labels.unique().tolist() == [0, 1, 2, 3]


def test_more_noise_spares_no_label_that_less_noise_hit() -> None:
    labels = torch.arange(1000) % 10
    few, many = (noisy_labels(labels, share, 10, seed=3) for share in (0.2, 0.5))
    hit = few != labels
    assert int(hit.sum()) > 100
    assert torch.equal(many[hit], few[hit])


# --- sources as values ---------------------------------------------------------------------


def test_a_default_that_is_given_changes_nothing() -> None:
    short, long = Source(family="gain"), Source(family="gain", gain=2, noise=0.25, label_noise=0)
    assert short == long
    assert hash(short) == hash(long)
    assert short.parameters() == {"translation": 48, "noise": 0.25, "amplitude": 0.4, "gain": 2.0}


def test_a_source_says_what_is_special_about_it() -> None:
    assert str(Source(family="mnist1d")) == "mnist1d × 4000"
    source = Source(family="gain", samples=500, gain=1.5, label_noise=0.3, seed=2)
    assert str(source) == "gain × 500, gain 1.5, 30% label noise, seed 2"


def test_an_unknown_family_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'shuffled'"):
        Source(family="shufled")


def test_a_parameter_that_the_family_lacks_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"parameter of the family 'xor'.*'gain'.*noise"):
        Source(family="xor", gain=1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 0}, "'samples' is out of range; given: 0; valid: a whole number from 1"),
        ({"samples": 10.5}, "'samples' is out of range; given: 10.5; valid: a whole"),
        ({"samples": True}, "'samples' is out of range; given: True"),
        ({"seed": -1}, "'seed' is out of range"),
        (
            {"label_noise": 1.1},
            "'label_noise' is out of range; given: 1.1; valid: a number from 0 up to 1",
        ),
        ({"label_noise": "much"}, "'label_noise' is out of range; given: 'much'"),
        ({"noise": -0.1}, "source's setting 'noise' is out of range"),
        ({"noise": float("nan")}, "source's setting 'noise' is out of range"),
        ({"noise": float("inf")}, "source's setting 'noise' is out of range"),
        ({"translation": 1.5}, "'translation' is out of range; given: 1.5; valid: a whole"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Source(family="mnist1d", **settings)  # type: ignore[arg-type]
