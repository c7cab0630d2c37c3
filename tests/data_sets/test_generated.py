"""The MNIST-1D generator: shapes, determinism, pairing of variants, and that it can be learned."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from esper import datasets
from esper.datasets import generated
from esper.datasets.generated import TEMPLATES, generate_glyphs
from esper.tolaria import find_task

Drawn = tuple[Tensor, Tensor]
STILL: dict[str, Any] = {"amplitude": 0, "noise": 0, "translation": 0}


def small(seed: int = 3) -> Drawn:
    return generate_glyphs(200, seed)


def clean(patch: pytest.MonkeyPatch, given: dict[str, Any] | None = None, **fixed: Any) -> Drawn:
    """Without any effect but those that are `given` or `fixed` for all."""
    for name, value in {"SHEAR": 0, "INDEPENDENT_NOISE": 0, **fixed}.items():
        patch.setattr(generated, name, value)
    return generate_glyphs(200, 3, **STILL | (given or {}))


def test_inputs_and_labels_have_the_promised_shapes_and_types() -> None:
    inputs, labels = small()
    assert inputs.shape == (200, 40)
    assert inputs.dtype == torch.float32
    assert labels.shape == (200,)
    assert labels.dtype == torch.int64


def test_the_set_is_standardised_and_its_classes_are_balanced() -> None:
    inputs, labels = small()
    assert abs(float(inputs.mean())) < 1e-5
    assert abs(float(inputs.std()) - 1) < 1e-4
    assert labels.bincount().tolist() == [20] * 10


def test_the_same_seed_gives_the_same_bits_and_leaves_the_global_stream_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second = small(), small()
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(before, torch.get_rng_state())


def test_another_seed_gives_another_set() -> None:
    first, second = small(), small(seed=4)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_without_any_effect_all_samples_of_a_class_with_equal_padding_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs, labels = clean(monkeypatch, PADDING=(48, 48))
    for label in range(10):
        members = inputs[labels == label]
        assert torch.equal(members, members[:1].expand_as(members))
    assert len(inputs.unique(dim=0)) == 10


def test_a_clean_glyph_is_its_template(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, labels = clean(monkeypatch, PADDING=(0, 0), LENGTH=12)
    for label, template in enumerate(TEMPLATES):
        glyph = inputs[labels == label][0].double()
        expected = torch.tensor(template, dtype=torch.float64)
        assert float(torch.corrcoef(torch.stack([glyph, expected]))[0, 1]) > 0.999


def test_a_glyph_fills_the_line_by_how_little_it_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, _ = clean(monkeypatch)
    spread = (wide - wide[:, -1:]).abs().gt(0.05).sum(1)
    assert int(spread.min()) < int(spread.max())
    assert int(spread.max()) < 40 / 2


def test_translation_moves_glyphs_around_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    still = peaks(clean(monkeypatch)[0])
    moved = peaks(clean(monkeypatch, {"translation": 48})[0])
    assert int(still.max()) < 12
    assert int(moved.max()) > 25


def peaks(inputs: Tensor) -> Tensor:
    return (inputs - inputs.median(1, keepdim=True).values).abs().argmax(1)


def test_shear_adds_a_straight_slope(monkeypatch: pytest.MonkeyPatch) -> None:
    empty_end = clean(monkeypatch, SHEAR=0.75)[0][:, -12:]
    assert float(empty_end.diff(n=2, dim=1).abs().max()) < 1e-4
    assert float(empty_end.diff(dim=1).min()) < -0.01
    assert float(empty_end.diff(dim=1).max()) > 0.01


def test_variants_share_their_labels_and_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = small()
    monkeypatch.setattr(generated, "INDEPENDENT_NOISE", 0.021)
    louder = small()
    assert torch.equal(plain[1], louder[1])
    assert float((plain[0] - louder[0]).abs().max()) < 0.1


def test_neighbours_in_correlated_noise_resemble_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs, _ = clean(monkeypatch, {"noise": 5.0}, PADDING=(400, 400), LENGTH=412)
    tail = inputs[:, 50:]
    pairs = torch.corrcoef(torch.stack([tail[:, :-1].flatten(), tail[:, 1:].flatten()]))
    far = torch.corrcoef(torch.stack([tail[:, :-20].flatten(), tail[:, 20:].flatten()]))
    assert float(pairs[0, 1]) > 0.9
    assert abs(float(far[0, 1])) < 0.1


def test_any_number_of_samples_can_be_generated() -> None:
    inputs, labels = generate_glyphs(7, 0)
    assert inputs.shape == (7, 40)
    assert labels.shape == (7,)
    assert torch.isfinite(inputs).all()


def test_a_linear_classifier_is_about_as_good_as_the_paper_says() -> None:
    inputs, labels = generate_glyphs(5000, 42)
    train, test = inputs[:4000].double(), inputs[4000:].double()
    ones = torch.ones(4000, 1, dtype=torch.float64)
    answers = torch.nn.functional.one_hot(labels[:4000], 10).double()
    weights = torch.linalg.lstsq(torch.cat([train, ones], 1), answers).solution
    guesses = torch.cat([test, ones[:1000]], 1) @ weights
    accuracy = float((guesses.argmax(1) == labels[4000:]).double().mean())
    assert 0.25 < accuracy < 0.40  # 32 % in the paper


def test_mnist1d_returns_three_different_sets() -> None:
    train, val, test = datasets.mnist1d(seed=2)
    assert [tuple(inputs.shape) for inputs, _ in (train, val, test)] == [
        (4000, 40),
        (2000, 40),
        (4000, 40),
    ]
    assert not torch.equal(train[0], test[0])
    assert torch.equal(datasets.mnist1d(seed=2).train[0], train[0])
    assert not torch.equal(datasets.mnist1d().train[0], train[0])


def test_mnist1d_equals_the_task_of_this_name() -> None:
    splits = find_task("mnist1d").load(0)
    data = datasets.mnist1d()
    for pair, split in zip(data, splits.named().values(), strict=True):
        assert torch.equal(pair[0], split.inputs)
        assert torch.equal(pair[1], split.labels)


def test_import_of_esper_datasets_does_not_import_torch() -> None:
    code = "import sys, esper; esper.datasets; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
