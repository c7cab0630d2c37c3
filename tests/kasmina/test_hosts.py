"""Esper's own hosts: sizes, the slots they announce, and that they fuse and trace."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from esper.kasmina.hosts import (
    HOSTS,
    Conv1dHost,
    Conv2dHost,
    FoldedHost,
    GptHost,
    MlpHost,
    PiecesHost,
    SegmentedHost,
    build_host,
)
from esper.kasmina.layers import ChannelNorm, GroupNorm, SelfAttention
from esper.leyline.errors import EsperError, UnknownNameError
from esper.leyline.slots import CANONICAL_SLOTS, Layout

SMALL: dict[str, Callable[[], SegmentedHost]] = {
    "conv1d": lambda: Conv1dHost(length=12, channels=3, kernel=3),
    "conv2d": lambda: Conv2dHost(channels_in=1, size=9, widths=(4, 6, 7)),
    "mlp": lambda: MlpHost(features=9, width=5),
    "gpt": lambda: GptHost(vocabulary=11, width=8, heads=2, context=6),
    "folded": lambda: FoldedHost(channels=3, norm="layer"),
    "pieces": lambda: PiecesHost(length=12, pieces=4, width=6),
}
each_host = pytest.mark.parametrize("name", list(HOSTS))


def make(name: str, seed: int = 0) -> SegmentedHost:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SMALL[name]().double()


def batch(name: str, size: int = 4, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    if name == "gpt":
        return torch.randint(11, (size, 5), generator=draw)
    shape = {"conv2d": (1, 9, 9), "mlp": (9,), "folded": (40,)}.get(name, (12,))
    return torch.randn(size, *shape, generator=draw, dtype=torch.float64)


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_garden_hosts_have_the_sizes_of_the_evidence() -> None:
    assert parameters(build_host("conv1d")) == 1114
    assert parameters(build_host("mlp")) == 1098


@each_host
def test_a_host_has_a_slot_after_each_segment_but_the_last(name: str) -> None:
    host = build_host(name)
    assert len(host.segments) == len(host.slot_specs()) + 1
    assert tuple(spec.name for spec in host.slot_specs()) == CANONICAL_SLOTS
    assert host.slot_paths() == {
        slot: f"segments.{index}" for index, slot in enumerate(CANONICAL_SLOTS)
    }


@each_host
def test_the_announced_slots_are_what_passes_through_them(name: str) -> None:
    host, x = make(name), batch(name)
    for segment, spec in zip(host.segments, host.slot_specs(), strict=False):
        x = segment(x)
        assert tuple(x.shape) == spec.canonical_shape(batch=4, free_extent=5)
    assert torch.equal(host.segments[-1](x), host(batch(name)))


def test_hosts_return_one_row_of_logits_per_answer() -> None:
    assert build_host("conv1d", classes=4)(torch.zeros(2, 40)).shape == (2, 4)
    assert build_host("mlp")(torch.zeros(2, 40)).shape == (2, 10)
    assert build_host("conv2d")(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert build_host("gpt")(torch.zeros(2, 7, dtype=torch.long)).shape == (2, 7, 256)


@pytest.mark.parametrize("depth", [1, 7])
@pytest.mark.parametrize("norm", ["none", "layer"])
def test_a_dense_host_has_a_slot_more_than_layers_and_learns_in_all_of_them(
    depth: int, norm: str
) -> None:
    host = MlpHost(features=9, width=5, depth=depth, activation="gelu", norm=norm)
    assert len(host.slot_specs()) == depth + 1
    host(torch.randn(64, 9)).square().sum().backward()
    assert all(bool(p.grad.any()) for p in host.parameters() if p.grad is not None)
    assert sum(p.grad is None for p in host.parameters()) == 0


def test_a_misspelt_activation_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'relu'"):
        MlpHost(activation="rel")


@pytest.mark.parametrize(("stages", "kernel", "length"), [(1, 1, 1), (2, 4, 9), (4, 7, 40)])
def test_a_sequence_host_announces_its_slots_in_any_shape(
    stages: int, kernel: int, length: int
) -> None:
    host = Conv1dHost(length=length, channels=3, kernel=kernel, stages=stages)
    x = torch.zeros(2, length)
    for segment, spec in zip(host.segments, host.slot_specs(), strict=False):
        x = segment(x)
        assert tuple(x.shape) == spec.canonical_shape(batch=2)
    assert host(torch.zeros(2, length)).shape == (2, 10)


def test_a_sequence_host_takes_inputs_with_and_without_a_channel_axis() -> None:
    host, x = make("conv1d"), batch("conv1d")
    assert torch.equal(host(x), host(x.unsqueeze(1)))


def test_the_language_model_does_not_see_the_future() -> None:
    host, tokens = make("gpt"), batch("gpt")
    other = tokens.clone()
    other[:, 3:] = (other[:, 3:] + 1) % 11
    assert torch.equal(host(tokens)[:, :3], host(other)[:, :3])
    assert not torch.allclose(host(tokens)[:, 3:], host(other)[:, 3:])


def test_the_language_model_knows_positions() -> None:
    logits = make("gpt")(torch.zeros(1, 5, dtype=torch.long))
    assert not torch.allclose(logits[:, 0], logits[:, 1])


@each_host
def test_every_host_parameter_gets_gradient(name: str) -> None:
    host = make(name)
    host(batch(name, size=64)).square().sum().backward()
    dead = [path for path, p in host.named_parameters() if p.grad is None or not p.grad.any()]
    assert not dead


@each_host
def test_hosts_fused_by_vmap_equal_the_same_hosts_one_by_one(name: str) -> None:
    hosts = [make(name, seed) for seed in range(3)]
    inputs = torch.stack([batch(name, seed=seed) for seed in range(3)])
    stacked, _ = stack_module_state(hosts)  # type: ignore[arg-type]

    def call(own: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(hosts[0], own, (x,))

    fused = vmap(call)(stacked, inputs)
    fused.square().sum().backward()
    for index, host in enumerate(hosts):
        alone = host(inputs[index])
        alone.square().sum().backward()
        torch.testing.assert_close(fused[index], alone, rtol=1e-10, atol=1e-10)
        for key, parameter in host.named_parameters():
            torch.testing.assert_close(stacked[key].grad[index], parameter.grad)


@each_host
def test_a_host_traces_into_plain_torch_modules(name: str) -> None:
    host = make(name)
    traced = torch.fx.symbolic_trace(host)
    for size in (2, 5):
        assert torch.equal(traced(batch(name, size)), host(batch(name, size)))
    homes = {type(module).__module__ for path, module in traced.named_modules() if path}
    assert all(home.startswith("torch.") for home in homes)


@each_host
def test_a_host_exports_with_a_free_batch_size(name: str) -> None:
    host = make(name)
    free_batch = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(host, (batch(name),), dynamic_shapes=free_batch)
    torch.testing.assert_close(program.module()(batch(name, 7)), host(batch(name, 7)))


@each_host
def test_building_a_host_twice_from_one_seed_gives_the_same_host(name: str) -> None:
    assert torch.equal(make(name)(batch(name)), make(name)(batch(name)))
    assert not torch.equal(make(name)(batch(name)), make(name, seed=1)(batch(name)))


def test_a_misspelt_host_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'conv1d'"):
        build_host("conv1")


def test_a_language_model_whose_heads_do_not_divide_its_width_is_refused() -> None:
    with pytest.raises(EsperError, match="width 10, heads 4"):
        GptHost(width=10, heads=4)


def test_a_host_with_the_wrong_number_of_slots_is_refused() -> None:
    with pytest.raises(EsperError, match="1 segments, 1 slots"):
        SegmentedHost([nn.Identity()], [(Layout.DENSE, 3, ())])


# --- the layers, against torch's own -------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm_equals_that_of_torch(groups: int) -> None:
    ours, theirs = GroupNorm(6, position_axes=2, groups=groups), nn.GroupNorm(groups, 6)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            theirs.get_parameter(name).copy_(parameter.normal_().flatten())
    x = torch.randn(3, 6, 4, 5)
    torch.testing.assert_close(ours(x), theirs(x))


def test_channel_norm_equals_the_layer_norm_of_torch() -> None:
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(ChannelNorm(8)(x), nn.LayerNorm(8)(x))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_equals_that_of_torch(causal: bool) -> None:
    layer, x = SelfAttention(8, inner=6, heads=2, causal=causal), torch.randn(3, 5, 8)
    query, key, value = (
        project(x).unflatten(-1, (2, 3)).transpose(1, 2)
        for project in (layer.query, layer.key, layer.value)
    )
    seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    torch.testing.assert_close(layer(x), layer.out(seen.transpose(1, 2).flatten(2)))
