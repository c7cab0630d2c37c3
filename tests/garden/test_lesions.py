"""Lesions: what a silenced host computes is what a smaller host would."""

import pytest
import torch
from torch import nn

from esper.garden import Lesion, lesion_mask
from esper.kasmina.hosts import Conv1dHost, MlpHost, SegmentedHost
from esper.leyline.errors import EsperError, UnknownNameError


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
