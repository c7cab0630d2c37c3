"""Every registered blueprint, over many shapes: cost, zero point, learning, fusing, tracing."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from esper.kasmina.blueprints import (
    ScalarGate,
    blueprint,
    blueprint_names,
    build_catalogue,
    cost,
    find_blueprint,
    learning_rate_scales,
    unregister_blueprint,
    zeroed,
)
from esper.leyline.catalogue import Trait
from esper.leyline.constants import GATE_LEARNING_RATE_SCALE
from esper.leyline.slots import Family, Layout, Reach, SlotSpec

LAYOUTS = {
    Family.CONV1D: (Layout.SEQUENCE, 1),
    Family.CONV2D: (Layout.IMAGE, 2),
    Family.DENSE: (Layout.DENSE, 0),
    Family.TRANSFORMER: (Layout.TOKENS, 1),
}
POPULATIONS = [(family, name) for family in Family for name in blueprint_names(family)]
# Along sequences a block is built as in images.
BLOCKS = [(f, "block") for f in Family if f is not Family.CONV1D]
BLUEPRINTS = POPULATIONS + BLOCKS
FAR = 12  # places: further than two kernels reach
each_blueprint = pytest.mark.parametrize(
    ("family", "name"), BLUEPRINTS, ids=[f"{family}-{name}" for family, name in BLUEPRINTS]
)


def spec_of(family: Family, channels: int, extent: int = 6) -> SlotSpec:
    layout, axes = LAYOUTS[family]
    return SlotSpec(name="early", layout=layout, channels=channels, extent=(extent,) * axes)


def build(family: Family, name: str, spec: SlotSpec, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return find_blueprint(name, family).build(spec).double()


def grown(family: Family, name: str, spec: SlotSpec, seed: int = 0) -> nn.Module:
    """A seed that no longer is at its zero point."""
    module = build(family, name, spec, seed)
    draw = torch.Generator().manual_seed(seed + 50)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return module


def activations(spec: SlotSpec, batch: int = 5, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(spec.canonical_shape(batch), generator=draw, dtype=torch.float64)


def entries_without_gradient(seed: nn.Module, h: Tensor, steps: int = 2) -> dict[str, int]:
    """How many numbers of each parameter saw no gradient in the first steps from birth."""
    target = activations_like(h)
    untouched = {name: torch.ones_like(p, dtype=torch.bool) for name, p in seed.named_parameters()}
    optimizer = torch.optim.Adam(seed.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        (h + seed(h) - target).square().sum().backward()
        for name, parameter in seed.named_parameters():
            if parameter.grad is not None:
                untouched[name] &= parameter.grad.abs() < 1e-9  # more than rounding errors
        optimizer.step()
    return {name: int(left.sum()) for name, left in untouched.items() if left.any()}


def activations_like(h: Tensor) -> Tensor:
    return torch.randn(h.shape, generator=torch.Generator().manual_seed(99), dtype=h.dtype)


# --- every blueprint -----------------------------------------------------------------------


def test_every_family_offers_at_least_five_blueprints() -> None:
    assert all(len(blueprint_names(family)) >= 5 for family in Family)


@each_blueprint
def test_a_blueprint_has_a_one_line_summary(family: Family, name: str) -> None:
    summary = find_blueprint(name, family).summary
    assert summary.endswith(".")
    assert summary != name


@each_blueprint
@settings(max_examples=25)
@given(channels=st.integers(1, 40), extent=st.integers(1, 9))
def test_the_announced_cost_is_the_real_count_and_the_seed_is_nothing_at_birth(
    family: Family, name: str, channels: int, extent: int
) -> None:
    spec = spec_of(family, channels, extent)
    seed = build(family, name, spec)
    real = sum(parameter.numel() for parameter in seed.parameters())
    assert cost(find_blueprint(name, family), spec) == real
    h = activations(spec)
    output = seed(h)
    assert output.shape == h.shape
    assert torch.equal(output, torch.zeros_like(h))
    assert torch.equal(h + output, h)
    assert not list(seed.buffers())


@pytest.mark.parametrize("family", list(Family))
def test_norm_is_the_cheapest_and_costs_two_per_channel_and_its_gate(family: Family) -> None:
    spec = spec_of(family, 16, 8)
    costs = {
        name: cost(find_blueprint(name, family), spec)
        for name in blueprint_names(family)
        if name != "token_mix"  # the others' cost depends on channels alone
    }
    assert costs["norm"] == min(costs.values()) == 2 * 16 + 1
    assert max(costs.values()) > 4 * costs["norm"]


@pytest.mark.parametrize("channels", [3, 7, 8])
@each_blueprint
def test_every_number_in_a_seed_gets_gradient_within_two_steps(
    family: Family, name: str, channels: int
) -> None:
    spec = spec_of(family, channels)
    seed = build(family, name, spec)
    behind_a_relu = activations(spec, batch=32).relu()
    assert entries_without_gradient(seed, behind_a_relu) == {}


def test_the_gradient_check_finds_layers_that_never_learn() -> None:
    zero_before_relu = nn.Sequential(zeroed(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 4)).double()
    h = activations(spec_of(Family.DENSE, 4))
    assert entries_without_gradient(zero_before_relu, h)["0.weight"] == 16
    cancelled = nn.Sequential(nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4), nn.Conv1d(4, 4, 1)).double()
    h = activations(spec_of(Family.CONV1D, 4))
    assert entries_without_gradient(cancelled, h) == {"0.bias": 4}


@each_blueprint
def test_seeds_fused_by_vmap_equal_the_same_seeds_one_by_one(family: Family, name: str) -> None:
    spec = spec_of(family, 6)
    seeds = [grown(family, name, spec, seed) for seed in range(3)]
    inputs = torch.stack([activations(spec, seed=index) for index in range(3)])
    stacked, _ = stack_module_state(seeds)  # type: ignore[arg-type]

    def call(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(seeds[0], parameters, (x,))

    fused = vmap(call)(stacked, inputs)
    fused.square().sum().backward()
    for index, seed in enumerate(seeds):
        alone = seed(inputs[index])
        alone.square().sum().backward()
        torch.testing.assert_close(fused[index], alone, rtol=1e-10, atol=1e-10)
        for key, parameter in seed.named_parameters():
            torch.testing.assert_close(
                stacked[key].grad[index], parameter.grad, rtol=1e-8, atol=1e-9
            )


def of_every_layer() -> list[tuple[Family, str]]:
    """As few blueprints as hold every kind of layer that any is made of, also where it may see
    the past alone: compiling is slow."""
    layers = {
        (family, name): {
            (type(part), family is Family.TRANSFORMER)
            for part in build(family, name, spec_of(family, 6)).modules()
        }
        for family, name in POPULATIONS
    }
    left, chosen = set().union(*layers.values()), []
    while left:
        chosen.append(max(layers, key=lambda each: len(layers[each] & left)))
        left -= layers[chosen[-1]]
    return chosen


COMPILED = [
    (Family.CONV1D, "norm"),
    (Family.CONV2D, "bottleneck"),
    (Family.DENSE, "convpool"),
    (Family.TRANSFORMER, "norm"),
]
# Compiling one of these blueprints takes up to ten seconds.
COMPILED_AT_NIGHT = [
    pytest.param(*plan, marks=pytest.mark.nightly)
    for plan in of_every_layer()
    if plan not in COMPILED
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), COMPILED + COMPILED_AT_NIGHT)
def test_fused_seeds_without_convolutions_compile_once_for_any_number_of_them(
    family: Family, name: str
) -> None:
    spec = spec_of(family, 6)
    seeds = [grown(family, name, spec, seed) for seed in range(4)]
    inputs = torch.stack([activations(spec, seed=index) for index in range(4)])
    stacked = {
        key: torch.stack([dict(seed.named_parameters())[key].detach() for seed in seeds])
        for key, _ in seeds[0].named_parameters()
    }

    def fused(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return vmap(lambda own, one: functional_call(seeds[0], own, (one,)))(parameters, x)

    # vmap turns a convolution into a grouped one, and its number of groups is a constant.
    convolves = any(isinstance(part, nn.Conv1d | nn.Conv2d) for part in seeds[0].modules())
    torch._dynamo.reset()
    compiled = torch.compile(fused, backend="aot_eager", dynamic=True, fullgraph=True)
    for count, stance in ((4, "default"), (3, "fail_on_recompile"))[: 1 if convolves else 2]:
        # Copies, because dynamo also guards on the tensor that a view was taken from.
        own = {key: value[:count].clone().requires_grad_() for key, value in stacked.items()}
        x = inputs[:count].clone()
        with torch.compiler.set_stance(stance):
            output = compiled(own, x)
        output.sum().backward()
        torch.testing.assert_close(output, fused(own, x))


@each_blueprint
def test_a_seed_traces_into_plain_torch_modules(family: Family, name: str) -> None:
    spec = spec_of(family, 6)
    seed = grown(family, name, spec)
    traced = torch.fx.symbolic_trace(seed)
    for batch in (2, 5):
        h = activations(spec, batch)
        assert torch.equal(traced(h), seed(h))
    homes = {type(module).__module__ for path, module in traced.named_modules() if path}
    assert all(home.startswith("torch.") for home in homes)


@each_blueprint
def test_a_seed_exports_with_a_free_batch_size(family: Family, name: str) -> None:
    spec = spec_of(family, 6)
    seed = grown(family, name, spec)
    free_batch = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(seed, (activations(spec, 3),), dynamic_shapes=free_batch)
    h = activations(spec, 7)
    torch.testing.assert_close(program.module()(h), seed(h))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@each_blueprint
def test_a_seed_keeps_the_type_of_its_input(family: Family, name: str, dtype: torch.dtype) -> None:
    spec = spec_of(family, 6)
    with torch.device("meta"):  # no bf16 kernel runs: some virtual machines lack the instruction
        seed = find_blueprint(name, family).build(spec).to(dtype)
        assert seed(torch.empty(spec.canonical_shape(2), dtype=dtype)).dtype == dtype


# --- what particular blueprints mean -------------------------------------------------------


def reach_into_the_past(seed: nn.Module, h: Tensor, changed: int) -> bool:
    """Whether changing tokens from `changed` on alters the output at any token before it."""
    other = h.clone()
    other[:, changed:] += 1.0
    return not torch.equal(seed(h)[:, :changed], seed(other)[:, :changed])


@pytest.mark.parametrize("name", [*blueprint_names(Family.TRANSFORMER), "block"])
def test_a_token_learns_nothing_of_the_future(name: str) -> None:
    spec = spec_of(Family.TRANSFORMER, 6, extent=7)
    seed = grown(Family.TRANSFORMER, name, spec)
    h = activations(spec)
    assert not any(reach_into_the_past(seed, h, changed) for changed in range(1, 7))


def test_attention_over_a_sequence_does_look_ahead() -> None:
    spec = spec_of(Family.CONV1D, 6, extent=7)
    seed = grown(Family.CONV1D, "attention", spec)
    before, after = activations(spec), activations(spec)
    after[:, :, -1] += 1.0
    assert not torch.equal(seed(before)[:, :, 0], seed(after)[:, :, 0])


@pytest.mark.parametrize("family", list(Family))
def test_norm_replaces_the_activations_when_its_gate_is_one(family: Family) -> None:
    spec = spec_of(family, 8)
    seed = build(family, "norm", spec)
    with torch.no_grad():
        seed.get_submodule("gate").get_parameter("weight").fill_(1.0)
    h = 7 * activations(spec) + 3
    result = h + seed(h)
    axes = (-1,) if family in (Family.DENSE, Family.TRANSFORMER) else tuple(range(1, h.dim()))
    variance, mean = torch.var_mean(result, dim=axes, correction=0)
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-9, rtol=0)
    torch.testing.assert_close(variance, torch.ones_like(variance), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "name"), [plan for plan in BLUEPRINTS if plan[1] in ("squeeze", "gate")]
)
def test_rescaling_stays_between_nothing_and_double(family: Family, name: str) -> None:
    spec = spec_of(family, 8)
    h = activations(spec).abs()
    result = h + grown(family, name, spec)(h)
    assert (result >= 0).all()
    assert (result <= 2 * h).all()
    assert not torch.allclose(result, h)


def test_convpool_finds_a_pattern_wherever_it_is() -> None:
    spec = spec_of(Family.DENSE, 40)
    seed = grown(Family.DENSE, "convpool", spec)
    pattern = activations(spec_of(Family.DENSE, 5), batch=1)
    here, there = (torch.nn.functional.pad(pattern, (left, 35 - left)) for left in (8, 21))
    torch.testing.assert_close(seed(here), seed(there))
    torch.testing.assert_close(seed(here).shape, here.shape)
    assert not torch.allclose(seed(here), seed(-here))


def test_a_scalar_gate_learns_ten_times_faster_than_the_rest() -> None:
    scales = learning_rate_scales(build(Family.DENSE, "norm", spec_of(Family.DENSE, 4)))
    assert scales.pop("gate.weight") == GATE_LEARNING_RATE_SCALE
    assert set(scales.values()) == {1.0}
    assert ScalarGate()(torch.ones(3)).equal(torch.zeros(3))


@each_blueprint
def test_a_blueprint_has_the_traits_that_it_is_said_to_have(family: Family, name: str) -> None:
    spec = spec_of(family, channels=6, extent=1 + 2 * FAR)
    if name == "block":  # whose norm would else see all places
        spec = dataclasses.replace(spec, reach=Reach.PAST)
    traits = Trait(find_blueprint(name, family).traits)
    seed, h = grown(family, name, spec), activations(spec)
    changed = h.clone()
    changed.select(spec.channel_axis, 0).neg_()
    moved = (seed(changed) - seed(h)).abs() > 1e-9
    if Trait.NORMALISES in traits:
        whole = h + seed(h) / seed.gate.weight
        larger = 9.0 * h + seed(9.0 * h) / seed.gate.weight
        torch.testing.assert_close(whole, larger, rtol=1e-3, atol=1e-3)
        return
    others = moved.narrow(spec.channel_axis, 1, 5)
    assert bool(others.any()) == (Trait.CHANNELS in traits)
    apart = seed(h) + seed(-h) - 2.0 * seed(torch.zeros_like(h))
    assert bool((apart.abs() > 1e-9).any()) == (Trait.BENDS in traits)
    if family is not Family.DENSE:
        axis = 1 if family is Family.TRANSFORMER else 2
        changed = h.clone()
        changed.select(axis, 0).neg_()
        reached = (seed(changed) - seed(h)).abs() > 1e-9
        assert bool(reached.select(axis, FAR).any()) == (Trait.GLOBAL in traits)
        near = bool(reached.select(axis, 1).any()) and Trait.GLOBAL not in traits
        assert near == (Trait.LOCAL in traits)


def test_of_a_blueprint_of_ones_own_nothing_is_known_but_what_is_said() -> None:
    spec = spec_of(Family.DENSE, 4)
    said = {"quiet": {}, "told": {"traits": Trait.CHANNELS}, "more": {"plain": True}}
    try:
        for name, given in said.items():
            blueprint(name, "dense", **given)(lambda spec: zeroed(nn.Linear(4, 4)))
        catalogue = build_catalogue([spec], 100, allowed=[*said, "conv"])
    finally:
        for name in said:
            unregister_blueprint(name, "dense")
    assert catalogue.traits == ((0, Trait.KNOWN | Trait.CHANNELS, Trait.PLAIN, 0),)
