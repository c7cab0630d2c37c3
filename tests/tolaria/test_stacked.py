"""Every stacked form against its module, one copy after the other, in double precision."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from esper.kasmina import blueprint, blueprint_names, unregister_blueprint, zeroed
from esper.kasmina.blueprints import find_blueprint
from esper.kasmina.hosts import HOSTS, build_host
from esper.leyline import Actions, Blend, BlueprintError, Family, Layout, Reach, SlotSpec
from esper.tolaria.stacked import library_norm, stack, stacked_convolution, written_norm
from tests.tolaria.twins import Twins, make_population

COPIES = 3
SPECS = {
    Family.CONV1D: SlotSpec(name="x", layout=Layout.SEQUENCE, channels=4, extent=(6,)),
    Family.CONV2D: SlotSpec(name="x", layout=Layout.IMAGE, channels=4, extent=(5, 5)),
    Family.DENSE: SlotSpec(name="x", layout=Layout.DENSE, channels=9),
    Family.TRANSFORMER: SlotSpec(name="x", layout=Layout.TOKENS, channels=8, extent=(5,)),
}


def compare(module: nn.Module, x: Tensor) -> None:
    """Outputs and every gradient of the stacked form equal those of the copies."""
    draw = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(COPIES, *p.shape, generator=draw, dtype=torch.float64, requires_grad=True)
        for name, p in module.named_parameters()
    }
    if x.is_floating_point():
        x = x.double().requires_grad_()
    module = module.double()
    fused = stack(module)(params, x)
    single = torch.stack(
        [
            torch.func.functional_call(module, {n: p[i] for n, p in params.items()}, (x[i],))
            for i in range(COPIES)
        ]
    )
    torch.testing.assert_close(fused, single, rtol=1e-10, atol=1e-12)
    wanted = [*params.values(), *([x] if x.requires_grad else [])]
    weight = torch.randn(fused.shape, generator=draw, dtype=torch.float64)
    ours = torch.autograd.grad((fused * weight).sum(), wanted)
    theirs = torch.autograd.grad((single * weight).sum(), wanted)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("family", "name"), [(f, name) for f in Family for name in (*blueprint_names(f), "block")]
)
def test_a_blueprints_stacked_form_equals_its_copies(family: Family, name: str) -> None:
    spec = SPECS[family]
    x = torch.randn(COPIES, *spec.canonical_shape(batch=4))
    compare(find_blueprint(name, family).build(spec), x)


@pytest.mark.parametrize("name", ["norm", "depthwise", "conv", "token_mix", "attention"])
def test_so_does_that_of_a_causal_one(name: str) -> None:
    spec = replace(SPECS[Family.CONV1D], reach=Reach.PAST)
    x = torch.randn(COPIES, *spec.canonical_shape(batch=4))
    compare(find_blueprint(name, Family.CONV1D).build(spec), x)


@pytest.mark.parametrize("name", list(HOSTS))
def test_a_hosts_stacked_segments_equal_its_copies(name: str) -> None:
    host = build_host(name)
    x = {
        "conv2d": torch.randn(COPIES, 2, 3, 32, 32),
        "gpt": torch.randint(256, (COPIES, 2, 7)),
    }.get(name, torch.randn(COPIES, 2, 40))
    compare(nn.Sequential(*host.segments), x)


@given(
    channels=st.integers(1, 4),
    outputs=st.integers(1, 4),
    length=st.integers(1, 9),
    taps=st.sampled_from([1, 3, 5]),
    stride=st.integers(1, 3),
    bias=st.booleans(),
    depthwise=st.booleans(),
    planes=st.booleans(),
)
def test_stacked_convolutions_equal_one_after_the_other(
    channels: int,
    outputs: int,
    length: int,
    taps: int,
    stride: int,
    bias: bool,
    depthwise: bool,
    planes: bool,
) -> None:
    draw = torch.Generator().manual_seed(channels * 100 + length)
    axes = 2 if planes else 1
    groups = channels if depthwise else 1
    outputs = channels if depthwise else outputs

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64, requires_grad=True)

    x = random(COPIES, 2, channels, *(length,) * axes)
    weight = random(COPIES, outputs, channels // groups, *(taps,) * axes)
    offset = random(COPIES, outputs) if bias else None
    settings = {"stride": stride, "padding": taps // 2, "groups": groups}
    layer = (nn.Conv2d if planes else nn.Conv1d)(channels, outputs, taps, **settings)
    fused = stacked_convolution(layer, x, weight, offset)
    convolve = nn.functional.conv2d if planes else nn.functional.conv1d
    single = torch.stack(
        [
            convolve(x[i], weight[i], None if offset is None else offset[i], **settings)
            for i in range(COPIES)
        ]
    )
    torch.testing.assert_close(fused, single, rtol=1e-10, atol=1e-12)
    wanted = [x, weight] + ([] if offset is None else [offset])
    for a, b in zip(
        torch.autograd.grad(fused.square().sum(), wanted),
        torch.autograd.grad(single.square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_a_users_own_blueprint_is_fused_and_equals_the_reference() -> None:
    class Mine(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.mix = nn.Bilinear(channels, channels, 3)
            self.out = zeroed(nn.Linear(3, channels))

        def forward(self, h: Tensor) -> Tensor:
            out: Tensor = self.out(torch.cos(self.mix(h, h)))
            return out

    @blueprint("mine", "dense")
    def mine(spec: SlotSpec) -> nn.Module:
        return Mine(spec.channels)

    try:
        population = make_population("mlp", 4, blueprints=("norm", "mine"))
        twins = Twins(population)
        twins.apply(
            Actions.of(population.space, 4, op=1, slot=1, blueprint=1, blend=int(Blend.GATE))
        )
        for _ in range(3):
            losses, _, _ = twins.epoch()
            torch.testing.assert_close(population.train_epoch().loss, losses, rtol=1e-9, atol=0)
            assert twins.difference() < 1e-9
    finally:
        unregister_blueprint("mine", "dense")


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(4, 4, 3, padding=2, dilation=2),
        nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv1d(4, 4, 3, padding="same"),
    ],
)
def test_unusual_convolutions_are_fused_right_too(layer: nn.Module) -> None:
    compare(layer, torch.randn(COPIES, 2, 4, 6))


def test_a_users_own_way_to_start_is_kept() -> None:
    @blueprint("shy", "dense")
    def shy(spec: SlotSpec) -> nn.Module:
        first = nn.Linear(spec.channels, 4)
        nn.init.normal_(first.weight, std=1e-3)
        return nn.Sequential(first, zeroed(nn.Linear(4, spec.channels)))

    try:
        population = make_population("mlp", 3, blueprints=("shy",))
        population.apply(Actions.of(population.space, 3, op=1, slot=1))
        rows = population.pools["seed", 1, 0].state.theta[:3]
        assert 0 < float(rows[:, : 4 * 6].abs().max()) < 0.01
        assert not torch.equal(rows[0], rows[1])
    finally:
        unregister_blueprint("shy", "dense")


def test_a_blueprint_that_keeps_or_draws_something_is_refused_with_the_reason() -> None:
    kinds = ((lambda: nn.Dropout(0.5), "dropout"), (lambda: nn.BatchNorm1d(4), "buffers"))
    for extra, fragment in kinds:

        @blueprint("impure", "dense")
        def impure(spec: SlotSpec, extra: Callable[[], nn.Module] = extra) -> nn.Module:
            return nn.Sequential(
                nn.Linear(spec.channels, 4), extra(), zeroed(nn.Linear(4, spec.channels))
            )

        try:
            with pytest.raises(BlueprintError, match=fragment):
                make_population("mlp", 2)
            make_population("mlp", 2, blueprints=("mlp",))
        finally:
            unregister_blueprint("impure", "dense")


def test_newborn_rows_are_drawn_as_the_module_draws_its_own() -> None:
    population = make_population("mlp", 400)
    pool = next(iter(population.pools.values()))
    columns = pool.template.views(pool.state.theta)
    module = population.build_host()
    for name, parameter in module.named_parameters():
        fan_in = (
            parameter.shape[1]
            if parameter.dim() > 1
            else dict(module.named_parameters())[name.replace("bias", "weight")].shape[1]
        )
        drawn, bound = columns[name][:-1], fan_in**-0.5
        assert float(drawn.abs().max()) <= bound
        assert float(drawn.mean()) == pytest.approx(0.0, abs=0.05 * bound)
        assert float(drawn.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
        assert float(parameter.detach().abs().max()) <= bound


def test_both_forms_of_the_norm_are_the_same() -> None:
    x = 3.0 + 2.0 * torch.randn(3, 5, 7, 8, dtype=torch.float64)
    grads = []
    for form in (library_norm, written_norm):
        given = x.clone().requires_grad_()
        normal = form(given)
        (grad,) = torch.autograd.grad((normal * x.roll(1, -1)).sum(), given)
        grads.append((normal.detach(), grad))
    for left, right in zip(*grads, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)
