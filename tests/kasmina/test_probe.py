"""Finding out what passes through a place: targets, samples, layouts, and what comes later."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import SlottedModel, Target, build_host
from esper.kasmina.probe import probe
from esper.kasmina.slot import part_of, replace_part
from esper.leyline import Layout
from esper.leyline.errors import SlotError, UnknownNameError
from tests.kasmina import zoo_sequence as sequence
from tests.kasmina import zoo_vision as vision
from tests.kasmina.zoo import IMAGES, TEXT, VECTORS, normal
from tests.kasmina.zoo_forms import Encoded
from tests.kasmina.zoo_refused import PADDING, REFUSED, Custom, Positions


@pytest.mark.parametrize(
    ("text", "target", "name"),
    [
        ("a.b", Target("a.b"), "a.b"),
        ("rnn@0", Target("rnn", part=0), "rnn@0"),
        ("trunk@features", Target("trunk", part="features"), "trunk@features"),
        ("@left", Target("", part="left"), "output@left"),
        ("", Target(""), "output"),
    ],
)
def test_a_place_can_be_written_as_text(text: str, target: Target, name: str) -> None:
    assert Target.parse(text) == target
    assert Target.parse(target) is target
    assert target.slot_name == name


def test_places_that_were_found_before_keep_their_order_among_others() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    [last] = probe(model, ["2"], torch.randn(4, 6))
    places = probe(model, ["0", last, Target("1")], torch.randn(4, 6))
    assert [place.module for place in places] == [model[0], model[2], model[1]]
    assert places[1] is last


def test_a_layout_can_be_written_as_text_and_must_exist() -> None:
    [place] = probe(vision.mlp(), [Target("1", layout="dense")], VECTORS)
    assert place.spec.layout is Layout.DENSE
    with pytest.raises(UnknownNameError, match="did you mean 'tokens'"):
        Target("1", layout="token")


STATED = {
    "nobody tells": Layout.SEQUENCE,
    "as long as wide": Layout.TOKENS,
    "disagreement": Layout.SEQUENCE,
    "heads of attention": Layout.IMAGE_LAST,
    "time first by hand": Layout.TIME_FIRST,
    "batch as long as time": Layout.TIME_FIRST,
    "state of a recurrent net": Layout.TIME_FIRST,
    "convnext as deep as wide": Layout.IMAGE,
}


@pytest.mark.parametrize("name", STATED)
def test_a_doubt_is_settled_by_stating_the_layout(name: str) -> None:
    [entry] = [entry for entry in REFUSED if entry.name == name]
    target = Target.parse(entry.places[0])
    stated = Target(target.path, part=target.part, layout=STATED[name])
    [place] = probe(entry.build(), [stated], entry.sample)
    assert place.spec.layout is STATED[name]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("shape", [(5, 5), (2, 2), (4, 6), (6, 4)])
def test_the_axis_that_follows_the_batch_is_told_by_another_batch(
    batch_first: bool, shape: tuple[int, int]
) -> None:
    """Also where batch and length are the same; the second axis if the time comes first."""
    model, sample = Positions(batch_first), torch.zeros(shape, dtype=torch.int64)
    [place] = probe(model, ["words"], sample)
    assert place.spec.layout is (Layout.TOKENS if batch_first else Layout.TIME_FIRST)
    assert place.spec.extent == (shape[1 if batch_first else 0],)
    with pytest.raises(SlotError, match="does not return something for every sample"):
        probe(model, ["places"], sample)


def test_rows_of_all_samples_together_follow_the_batch() -> None:
    class Flat(nn.Module):
        """Patches of all images in one axis, [B * 4, C]."""

        def __init__(self) -> None:
            super().__init__()
            self.patch, self.head = nn.Linear(5, 7), nn.Linear(28, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.patch(x.reshape(-1, 5)).view(x.shape[0], 28))  # type: ignore[no-any-return]

    [place] = probe(Flat(), ["patch"], normal(4, 20))
    assert place.spec.layout is Layout.DENSE


def test_a_model_that_takes_one_batch_size_only_is_believed() -> None:
    model = Custom(nn.Linear(10, 8), lambda x: x.view(4, 8), nn.Linear(8, 4))
    [place] = probe(model, ["by_hand"], VECTORS)
    assert place.spec.channels == 8


def test_positions_that_vary_between_calls_are_left_open() -> None:
    class TwoSizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).mean((2, 3)) + self.conv(x[..., ::2]).mean((2, 3))

    [place] = probe(TwoSizes(), ["conv"], IMAGES)
    assert place.spec.extent == (8, None)


def test_a_part_with_a_digit_for_a_name_is_found() -> None:
    class Digits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(10, 8)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"0": self.fc(x), "1": x}

    [place] = probe(Digits(), ["@0"], VECTORS)
    assert place.part == "0"
    assert place.spec.channels == 8


def test_a_model_that_works_in_place_on_its_input_leaves_the_sample_as_it_was() -> None:
    model = Custom(nn.ReLU(inplace=True), lambda x: x.sub_(1), nn.Linear(10, 4))
    sample = VECTORS.clone()
    probe(model, ["by_hand"], sample)
    assert torch.equal(sample, VECTORS)


def test_a_batch_of_one_is_enough_for_a_model_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).train()
    model[1].eval()
    [place] = probe(model, ["2"], VECTORS[:1])
    assert place.spec.channels == 8
    assert [part.training for part in model] == [True, False, True, True]


def test_a_failure_without_words_is_reported() -> None:
    def fail(x: Tensor) -> Tensor:
        raise NotImplementedError

    with pytest.raises(SlotError, match="given: NotImplementedError: ;"):
        probe(Custom(nn.Linear(10, 8), fail), ["stem"], VECTORS)


def test_a_model_that_must_not_be_evaluated_is_probed_in_training() -> None:
    class TrainingOnly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(10, 8)

        def forward(self, x: Tensor) -> Tensor:
            assert self.training
            return self.fc(x)

    [place] = probe(TrainingOnly(), ["fc"], VECTORS)
    assert place.spec.channels == 8


def test_a_path_keeps_its_letters_in_a_message() -> None:
    model = nn.Sequential()
    model.add_module("ConvA", nn.Conv3d(1, 2, 1))
    with pytest.raises(SlotError, match=r"^Submodule 'ConvA' returns activations of 5"):
        probe(model, ["ConvA"], normal(2, 1, 3, 3, 3))


def test_an_esper_host_carries_slots_once() -> None:
    host = build_host("mlp", features=10, width=8)
    SlottedModel(host).germinate("early", "mlp", "immediate")
    with pytest.raises(SlotError, match="carries slots already"):
        SlottedModel(host)


def test_few_of_many_paths_are_shown() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(40)))
    with pytest.raises(UnknownNameError) as refusal:
        probe(model, ["head"], VECTORS)
    assert str(refusal.value).count(",") < 12


def test_an_encoder_told_not_to_nest_carries_slots_with_a_padding_mask() -> None:
    model = sequence.TextEncoder(batch_first=True)
    model.encoder.use_nested_tensor = False
    sample = {"tokens": TEXT, "padding": PADDING}
    host = SlottedModel(model, ["encoder.layers.0"], sample).eval()
    with torch.no_grad():
        expected = host(**sample)
        host.germinate("encoder.layers.0", "attention", "immediate")
        assert torch.allclose(expected, host(**sample), atol=1e-6)


# --- what comes later ------------------------------------------------------------------------


def test_a_nested_tensor_at_a_slot_is_refused_with_the_remedy() -> None:
    model = sequence.TextEncoder(batch_first=True)
    host = SlottedModel(model, ["encoder.layers.0"], TEXT).eval()
    host.germinate("encoder.layers.0", "attention", "immediate")
    with torch.no_grad(), pytest.raises(SlotError, match="use_nested_tensor = False"):
        host(TEXT, PADDING)


def test_activations_of_another_width_are_refused() -> None:
    class Slices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(10, 8)
            self.slice = nn.Identity()

        def forward(self, x: Tensor, width: int = 8) -> Tensor:
            return self.slice(self.fc(x)[:, :width]).sum(1)

    host = SlottedModel(Slices(), ["slice"], VECTORS)
    host(VECTORS, 5)
    host.germinate("slice", "mlp", "immediate")
    with pytest.raises(SlotError, match="met activations of another shape; given: \\[4, 5\\]"):
        host(VECTORS, 5)


def test_a_seed_that_depends_on_the_length_refuses_another() -> None:
    host = SlottedModel(sequence.pointnet(), ["2"], normal(4, 3, 9))
    host.germinate("2", "token_mix", "immediate")
    host(normal(2, 3, 9))
    with pytest.raises(SlotError, match="and \\[9\\] positions, as its seed needs"):
        host(normal(4, 3, 7))


def test_a_module_that_returns_another_type_is_refused() -> None:
    host = SlottedModel(vision.DeepSupervision(), [""], IMAGES)
    host.germinate("output", "mlp", "immediate")
    assert host.eval()(IMAGES).shape == (4, 4)
    with pytest.raises(SlotError, match="met an output of another type; given: tuple"):
        host.train()(IMAGES)


def test_a_module_that_no_longer_returns_a_part_is_refused() -> None:
    with pytest.raises(SlotError, match="changed the form of its output; given: Tensor"):
        part_of(torch.ones(()), 0)
    with pytest.raises(SlotError, match="with part 'a'"):
        part_of({}, "a")


class Named(list[Any]):
    """A list class of the model's own."""


@pytest.mark.parametrize(
    "output",
    [
        (1, 2, 3),
        [1, 2, 3],
        Named([1, 2, 3]),
        Encoded(1, 2),
        torch.return_types.max((1, 2)),
        {0: 1, 1: 2},
    ],
    ids=lambda output: type(output).__name__,
)
def test_one_part_is_exchanged_and_the_original_stays(output: Any) -> None:
    before = list(output) if not isinstance(output, dict) else dict(output)
    changed = replace_part(output, 0, 9)
    assert type(changed) is type(output)
    assert part_of(changed, 0) == 9
    assert part_of(changed, 1) == 2
    assert (list(output) if not isinstance(output, dict) else output) == before
