"""Contexts as values: equality, keys, drift, tables, lesions, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from esper.garden import Context, Lesion, Source, lesion_mask
from esper.kasmina.hosts import Conv1dHost, MlpHost, SegmentedHost
from esper.leyline.errors import DataError, EsperError, UnknownNameError

PLAIN = Context(name="plain", family="mnist1d", source=Source(family="mnist1d"))
RICH = Context(
    name="rich",
    family="drift",
    source=Source(family="gain", samples=500, gain=1.5, label_noise=0.3, seed=3),
    lesion=Lesion(kind="narrow", stage=1),
    drift=Source(family="xor", noise=0.2),
    drift_window=(4, 9),
    host_sizes=(("kernel", 3), ("channels", 6)),
    scale=12.0,
)


def test_a_context_is_a_value() -> None:
    twin = Context.from_dict(RICH.to_dict())
    assert twin == RICH
    assert hash(twin) == hash(RICH)
    assert len({PLAIN, RICH, twin}) == 2


def test_a_context_says_what_it_is() -> None:
    assert str(PLAIN) == "plain: mnist1d × 4000; conv1d"
    assert str(RICH) == (
        "rich: gain × 500, gain 1.5, 30% label noise, seed 3; "
        "half the time then xor × 4000, noise 0.2 (from epoch 4-9); "
        "narrow at stage 1; conv1d channels=6 kernel=3"
    )


def test_building_a_context_draws_nothing_from_the_global_stream() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    replace(RICH, host_sizes=(("channels", 5),))
    assert torch.equal(before, torch.get_rng_state())


def test_a_context_builds_its_host() -> None:
    assert RICH.build_host().slot_specs()[0].channels == 6
    assert PLAIN.build_host()(torch.zeros(2, 40)).shape == (2, 10)


# --- the key -------------------------------------------------------------------------------


def test_the_key_ignores_what_changes_no_number() -> None:
    other = replace(RICH, name="another", family="else", scale=99.0)
    assert other.key == RICH.key
    assert replace(PLAIN, drift_window=(1, 2)).key == PLAIN.key  # there is no drift
    turned = replace(RICH, host_sizes=tuple(reversed(RICH.host_sizes)))
    assert turned == RICH


@pytest.mark.parametrize(
    "change",
    [
        {"source": replace(RICH.source, samples=501)},
        {"source": replace(RICH.source, gain=1.6)},
        {"source": replace(RICH.source, seed=4)},
        {"lesion": None},
        {"lesion": Lesion(kind="narrow", stage=2)},
        {"lesion": Lesion(kind="tap", stage=1)},
        {"drift": None},
        {"drift": replace(RICH.source, gain=1.6)},
        {"drift_window": (4, 8)},
        {"host_sizes": ()},
    ],
)
def test_the_key_knows_everything_that_changes_numbers(change: dict[str, Any]) -> None:
    assert replace(RICH, **change).key != RICH.key


def test_the_key_is_the_same_on_every_machine_and_day() -> None:
    assert PLAIN.key == "e0f819abc5a7"


# --- drift ---------------------------------------------------------------------------------


def test_the_task_changes_half_the_time_and_within_the_window() -> None:
    epochs = [RICH.drift_epoch(seed) for seed in range(1000)]
    changed = [epoch for epoch in epochs if epoch is not None]
    assert 440 < len(changed) < 560
    assert set(changed) == set(range(4, 10))


def test_drift_is_decided_by_the_seed_alone() -> None:
    epochs = [RICH.drift_epoch(seed) for seed in range(50)]
    assert epochs == [replace(RICH, name="other", scale=5.0).drift_epoch(s) for s in range(50)]
    assert epochs != [RICH.drift_epoch(seed) for seed in range(50, 100)]


def test_a_context_without_drift_never_changes() -> None:
    assert all(PLAIN.drift_epoch(seed) is None for seed in range(50))


# --- tables --------------------------------------------------------------------------------


def test_a_table_holds_plain_values_and_nothing_absent() -> None:
    assert PLAIN.to_dict() == {
        "name": "plain",
        "family": "mnist1d",
        "source": {
            "family": "mnist1d",
            "samples": 4000,
            "label_noise": 0.0,
            "seed": 0,
            "translation": 48,
            "noise": 0.25,
            "amplitude": 0.4,
        },
        "host": "conv1d",
        "scale": 3.0,
    }
    record = RICH.to_dict()
    assert record["lesion"] == {"kind": "narrow", "stage": 1}
    assert record["drift_window"] == [4, 9]
    assert record["host_sizes"] == {"channels": 6, "kernel": 3}


SOURCE = {"family": "mnist1d"}
TABLE = {"name": "mine", "family": "mnist1d", "source": SOURCE}


def test_a_short_table_is_enough() -> None:
    assert Context.from_dict(TABLE) == replace(PLAIN, name="mine")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sauce": SOURCE}, "Unknown key of a context; given: 'sauce'.*did you mean 'source'"),
        ({"source": SOURCE | {"sampels": 5}}, "key of a source.*did you mean 'samples'"),
        ({"source": {}}, "A source lacks its family; given: nothing; valid: at least family"),
        ({"source": "mnist1d"}, "Wrong type of source; given: 'mnist1d'; valid: a table"),
        ({"drift": 3}, "Wrong type of source; given: 3"),
        ({"lesion": {"kind": "tap"}}, "A lesion lacks its stage; given: kind; valid: at least k"),
        ({"lesion": {"kind": "tap", "stag": 1}}, "key of a lesion.*did you mean 'stage'"),
        ({"lesion": "tap"}, "Wrong type of lesion"),
        ({"host_sizes": 6}, "Wrong type of host_sizes of a context; given: 6"),
        ({"drift_window": 6}, "Impossible drift_window of a context; given: 6"),
        ({"drift_window": [6]}, "Impossible drift_window"),
        ({"drift_window": [9, 6]}, "Impossible drift_window.*first epoch <= last epoch"),
        ({"drift_window": [6, "9"]}, "Impossible drift_window"),
        ({"scale": 0}, "'scale' is out of range; given: 0; valid: a number above 0"),
        ({"scale": -1}, "context's setting 'scale' is out of range; given: -1"),
        ({"scale": "big"}, "'scale' is out of range; given: 'big'; valid: a number"),
        ({"name": ""}, "Impossible name of a context; given: ''"),
        ({"name": "two words"}, "Impossible name of a context; given: 'two words'; valid: letters"),
        ({"name": "a[/b]"}, "Impossible name of a context"),
        ({"name": "a$x$"}, "Impossible name of a context"),
        ({"family": 3}, "Impossible family of a context; given: 3"),
        ({"host": "conv1"}, "Unknown host; given: 'conv1'.*did you mean 'conv1d'"),
        ({"host_sizes": {"chanels": 6}}, "size of the host 'conv1d'.*did you mean 'channels'"),
        (
            {"host_sizes": {"channels": 0}},
            "'channels' of the host 'conv1d' is out of range; given: 0",
        ),
        (
            {"host_sizes": {"channels": "6"}},
            "'channels' of the host 'conv1d' is out of range; given: '6'; valid: a whole",
        ),
        ({"host_sizes": {"classes": 4}}, r"does not fit.*it makes of one line.*: \[1, 4\]"),
        ({"host": "conv2d"}, "The host 'conv2d' does not fit the garden's data"),
        ({"host": "mlp", "lesion": {"kind": "tap", "stage": 1}}, "cannot have a lesion"),
        ({"lesion": {"kind": "narrow", "stage": 3}}, "valid: stage 0 or 1 or 2"),
    ],
)
def test_a_malformed_table_is_refused_in_one_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EsperError, match=message) as caught:
        Context.from_dict(TABLE | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", list(TABLE))
def test_a_context_that_lacks_a_part_is_refused(missing: str) -> None:
    table = {key: value for key, value in TABLE.items() if key != missing}
    with pytest.raises(DataError, match=f"A context lacks its {missing}; .* name, family, source"):
        Context.from_dict(table)


def test_parts_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(DataError, match=r"Wrong type of source; given: None; valid: a table"):
        replace(PLAIN, source=None)
    with pytest.raises(DataError, match=r"Wrong type of lesion; given: 'tap'"):
        replace(PLAIN, lesion="tap")
    with pytest.raises(DataError, match=r"Wrong type of host_sizes of a context.*pairs"):
        replace(PLAIN, host_sizes="channels")


def test_an_error_of_a_name_can_be_told_from_others() -> None:
    with pytest.raises(UnknownNameError):
        Context.from_dict(TABLE | {"hots": "mlp"})


# --- lesions: what a silenced host computes is what a smaller host would ----------------------


def _lesioned(host: SegmentedHost, lesion: Lesion) -> SegmentedHost:
    mask, start = lesion_mask(host, lesion), 0
    with torch.no_grad():
        for parameter in host.parameters():
            live = mask[start : start + parameter.numel()].view_as(parameter)
            parameter *= live
            start += parameter.numel()
    assert start == len(mask)
    return host


def _layers(host: SegmentedHost) -> list[nn.Conv1d | nn.Linear]:
    return [part for part in host.modules() if isinstance(part, nn.Conv1d | nn.Linear)]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_narrowed_host_computes_what_one_with_two_channels_there_would(stage: int) -> None:
    torch.manual_seed(stage)
    host = _lesioned(Conv1dHost(), Lesion(kind="narrow", stage=stage))
    x = torch.randn(5, 40)
    small = nn.Sequential(*host.segments)
    assert host(x).shape == (5, 10)
    expected = _narrow_copy(host, stage)
    torch.testing.assert_close(small(x), expected(x), rtol=0, atol=1e-6)


def _narrow_copy(host: SegmentedHost, stage: int) -> nn.Module:
    """The same function with a convolution of two channels at the stage, built anew."""
    parts: list[nn.Module] = [nn.Unflatten(1, (1, 40))]
    layers = _layers(host)
    for index, layer in enumerate(layers[:-1]):
        assert isinstance(layer, nn.Conv1d)
        assert layer.bias is not None
        weight, bias = layer.weight.detach(), layer.bias.detach()
        if index == stage:
            weight, bias = weight[:2], bias[:2]
        if index == stage + 1:
            weight = weight[:, :2]
        new = nn.Conv1d(weight.shape[1], weight.shape[0], 5, stride=2, padding=2)
        new.load_state_dict({"weight": weight, "bias": bias})
        parts += [new, nn.ReLU()]
    head = layers[-1]
    weight = head.weight.detach()
    if stage == 2:
        weight = weight.view(10, 8, -1)[:, :2].flatten(1)
    last = nn.Linear(weight.shape[1], 10)
    last.load_state_dict({"weight": weight, "bias": head.bias.detach()})
    return nn.Sequential(*parts, nn.Flatten(1), last)


@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_tapped_stage_computes_what_a_kernel_of_one_point_would(stage: int, kernel: int) -> None:
    torch.manual_seed(stage)
    host = _lesioned(Conv1dHost(kernel=kernel), Lesion(kind="tap", stage=stage))
    layer = _layers(host)[stage]
    assert isinstance(layer, nn.Conv1d)
    point = nn.Conv1d(layer.in_channels, layer.out_channels, 1, stride=2)
    point.load_state_dict({"weight": layer.weight[..., [kernel // 2]], "bias": layer.bias})
    h = torch.randn(4, layer.in_channels, 12)
    torch.testing.assert_close(layer(h), point(h), rtol=0, atol=1e-6)


def test_silenced_weights_are_those_of_the_stage_and_no_others() -> None:
    host = Conv1dHost(channels=4, kernel=3, stages=2)  # 4×1×3 + 4, 4×4×3 + 4, then the head
    dead = (~lesion_mask(host, Lesion(kind="narrow", stage=1))).nonzero()[:, 0].tolist()
    weights, biases = list(range(16 + 24, 16 + 48)), list(range(16 + 48 + 2, 16 + 48 + 4))
    assert dead == weights + biases
    assert int((~lesion_mask(host, Lesion(kind="tap", stage=0))).sum()) == 8


def test_a_dense_layer_can_be_narrowed() -> None:
    host = MlpHost()
    mask = lesion_mask(host, Lesion(kind="narrow", stage=1))
    assert int((~mask).sum()) == 14 * 40 + 14
    h = torch.randn(3, 40)
    narrow = _lesioned(host, Lesion(kind="narrow", stage=1)).segments[1](h)
    assert bool((narrow[:, 2:] == 0).all())


def test_no_lesion_leaves_every_weight_alive() -> None:
    host = MlpHost()
    assert bool(lesion_mask(host, None).all())


def test_a_mask_needs_no_weights_and_has_none_of_the_hosts_devices() -> None:
    with torch.device("meta"):
        host = Conv1dHost()
    mask = lesion_mask(host, Lesion(kind="tap", stage=1))
    assert mask.device.type == "cpu"


@pytest.mark.parametrize(
    ("lesion", "message"),
    [
        (Lesion(kind="tap", stage=1), "'tap at stage 1'.*no convolution; valid: a host with a con"),
        (Lesion(kind="narrow", stage=0), "stage 0 has no .*dense layer; valid: stage 1 or 2"),
        (Lesion(kind="narrow", stage=3), "stage 3 has no"),
    ],
)
def test_a_lesion_that_a_dense_host_cannot_have_is_refused(lesion: Lesion, message: str) -> None:
    with pytest.raises(EsperError, match=message):
        lesion_mask(MlpHost(), lesion)


def test_the_head_cannot_be_lesioned() -> None:
    with pytest.raises(EsperError, match="valid: stage 0 or 1 or 2"):
        lesion_mask(Conv1dHost(), Lesion(kind="narrow", stage=3))


def test_unknown_kinds_and_stages_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'narrow'"):
        Lesion(kind="narow", stage=0)
    with pytest.raises(
        EsperError, match="'stage' is out of range; given: -1; valid: a whole number from 0"
    ):
        Lesion(kind="tap", stage=-1)
    with pytest.raises(EsperError, match="'stage' is out of range; given: '1'"):
        Lesion(kind="tap", stage="1")  # type: ignore[arg-type]
