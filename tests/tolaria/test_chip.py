"""The chip backend's arithmetic, compiled as C++, against torch."""

import ctypes
import logging
import os
import platform
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import GateRules, Isolation, blueprint_names, build_catalogue
from esper.kasmina.blueprints import Attend, Replace, Rescale, Transposed, find_blueprint
from esper.kasmina.hosts import MlpHost, SegmentedHost, build_host
from esper.kasmina.layers import ChannelNorm, GroupNorm, SelfAttention, TokenLinear
from esper.leyline import Actions, Blend, BlueprintError, EsperError, LifecycleOp, SeedStage
from esper.leyline.shadows import AuditionPlan
from esper.tolaria.chip import build
from esper.tolaria.chip.build import build_library, find_compiler
from esper.tolaria.chip.source import ChipProgram, ProgramWriter, require_fitting, write_program
from esper.tolaria.chip.tape import record
from esper.tolaria.data.splits import Split, Splits
from esper.tolaria.feed import SPLITS, Feed
from esper.tolaria.optimisers import AdamW, RowOptimiser, Sgd
from esper.tolaria.plan import HOST
from esper.tolaria.pools import Pool
from esper.tolaria.population import Population
from esper.tolaria.population_config import PopulationConfig
from esper.tolaria.random_streams import uniform
from tests.tolaria.twins import HOSTS, SHAPES, Twins, draw_actions, make_population

pytestmark = pytest.mark.skipif(
    find_compiler() is None, reason="there is no C++ compiler to build the chip backend with"
)
CHUNK = 5
FAMILY = {"mlp": "dense", "conv1d": "conv1d"}
each_host = pytest.mark.parametrize("name", ["mlp", "conv1d"])


def program_of(name: str) -> tuple[SegmentedHost, ChipProgram]:
    host = HOSTS[name]()
    params = sum(parameter.numel() for parameter in host.parameters())
    catalogue = build_catalogue(host.slot_specs(), params)
    return host, write_program(host, catalogue, SHAPES[name][0], CHUNK)


def address(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def assert_equal_to_module(
    library: ctypes.CDLL,
    which: int,
    module: nn.Module,
    shape: tuple[int, ...],
    draw: torch.Generator,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Output and gradients, with weights that act and gradients that are added to."""
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    x = torch.randn(CHUNK, *shape, generator=draw).double().requires_grad_()
    expected = module(x)
    gy = torch.randn(expected.shape, generator=draw).double()
    grads = torch.autograd.grad(expected, [x, *module.parameters()], gy)
    none = torch.zeros(0, dtype=torch.float64)
    theta = torch.cat([none, *(each.detach().flatten() for each in module.parameters())])
    before = torch.randn(x.shape, generator=draw).double()
    y, gx, gtheta = torch.zeros(expected.shape).double(), before.clone(), torch.ones_like(theta)
    sample_last = [each.detach().flatten(1).T.contiguous().to(dtype) for each in (x, y, gy, gx)]
    theta, gtheta = theta.to(dtype), gtheta.to(dtype)
    pointers = [address(each) for each in (theta, *sample_last, gtheta)]
    library.run_seed(which, x[0].numel(), *pointers)
    y, gx = (
        each.T.reshape(x.shape[:1] + like.shape[1:]).double()
        for each, like in zip(sample_last[1::2], (y, gx), strict=True)
    )
    ours = torch.cat([none, *(grad.flatten() for grad in grads[1:])])
    pairs = (gx - before, grads[0], 10.0), (gtheta.double() - 1.0, ours, 10.0)
    for found, wanted, rough in ((y, expected.detach(), 1.0), *pairs):
        if dtype == torch.float64:
            torch.testing.assert_close(found, wanted, rtol=1e-11 * rough, atol=1e-12 * rough)
        else:  # norms of a few numbers that are nearly alike lose digits
            assert float((found - wanted).norm()) < 1e-4 * (1.0 + float(wanted.norm()))


@pytest.mark.slow
@each_host
def test_every_seed_and_its_gradients_equal_its_module(name: str) -> None:
    host, program = program_of(name)
    library = build_library(program.text, torch.float64)
    catalogue = build_catalogue(host.slot_specs(), 1)
    draw = torch.Generator().manual_seed(3)
    for (slot, index), which in program.which.items():
        spec = host.slot_specs()[slot]
        seed = find_blueprint(catalogue.names[index], spec.family).build(spec)
        assert_equal_to_module(library, which, seed, spec.canonical_shape(batch=1)[1:], draw)
    assert {catalogue.names[index] for _, index in program.which} == set(catalogue.names)


def drawn_layers(draw: random.Random) -> Iterator[tuple[nn.Module, tuple[int, ...]]]:
    """Every layer and way to compose, in sizes of their own."""
    C, L, T = draw.randint(1, 6), draw.randint(1, 9), draw.randint(2, 7)
    groups = draw.choice([each for each in (1, 2, 3, C) if C % each == 0])
    kernel, stride, pad = draw.randint(1, 5), draw.randint(1, 3), draw.randint(0, 2)
    long = (C, L + kernel)
    yield nn.Linear(C, T, bias=draw.random() < 0.5), (C,)
    yield TokenLinear(L, T), (C, L)
    yield nn.Conv1d(C, 2 * C, kernel, stride, pad, groups=groups), long
    yield nn.Conv1d(C, T, kernel, stride, pad, bias=False), long
    yield nn.Sequential(nn.ReLU(), nn.Conv1d(C, C, 1), nn.LeakyReLU(0.2), nn.Conv1d(C, 2, 1)), long
    yield nn.Sequential(nn.Conv1d(C, C, 1), nn.GELU(), nn.Conv1d(C, 2, 1), nn.Tanh()), long
    yield nn.Sequential(nn.Linear(C, T), ChannelNorm(T), nn.Tanh(), nn.GELU()), (C,)
    plane = (C, T + 1, kernel + 1)
    yield nn.Conv2d(C, 2 * C, 3, stride, 1, groups=groups), plane
    yield nn.Sequential(nn.Conv2d(C, C, kernel, stride, 2), nn.ReLU(), nn.Conv2d(C, T, 1)), plane
    yield GroupNorm(C, position_axes=2, groups=groups), plane
    yield nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(C, T)), plane
    yield ChannelNorm(C), (C,)
    yield Transposed(ChannelNorm(C)), (C, L)
    yield GroupNorm(C, position_axes=1, groups=groups), (C, L)
    yield nn.Sequential(nn.AdaptiveMaxPool1d(1), nn.Flatten(1), nn.Linear(C, T)), (C, L)
    yield nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(1), nn.ReLU()), (C, L)
    yield Replace(nn.Sequential(nn.Conv1d(C, C, 3, padding=1), nn.LeakyReLU(0.1))), (C, L)
    # What a rescaled value is made of must outlive the layer in place that looks at it.
    yield nn.Sequential(nn.Linear(T, T), Rescale(nn.Sequential(nn.ReLU(), nn.Linear(T, T)))), (T,)
    heads = draw.choice([1, 2])
    for causal in (False, True):
        yield SelfAttention(C, inner=2 * heads, heads=heads, causal=causal), (T, C)
        yield Transposed(Attend(C, causal=causal)), (C, T)


def library_of(
    layers: Sequence[tuple[nn.Module, tuple[int, ...]]], dtype: torch.dtype, chunk: int = CHUNK
) -> tuple[ctypes.CDLL, list[int]]:
    """A program with these as seeds, and their numbers."""
    writer = ProgramWriter([(1,)], 1, input_size=1, chunk=chunk)
    for _ in range(2):
        writer.segment(record(nn.Linear(1, 1), (1,)))
    numbers = [writer.seed(0, 0, record(module, shape)) for module, shape in layers]
    return build_library(writer.finished().text, dtype), numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float64, 2),
        (torch.float32, 1),
        pytest.param(torch.float64, 4, marks=pytest.mark.nightly),
        pytest.param(torch.float32, 4, marks=pytest.mark.nightly),
    ],
)
def test_every_layer_and_its_gradients_equal_torchs_in_many_sizes(
    dtype: torch.dtype, sizes: int
) -> None:
    torch.manual_seed(5)
    draw = random.Random(5)
    layers = [each for _ in range(sizes) for each in drawn_layers(draw)]
    library, numbers = library_of(layers, dtype)
    draws = torch.Generator().manual_seed(7)
    for which, (module, shape) in zip(numbers, layers, strict=True):
        assert_equal_to_module(library, which, module, shape, draws, dtype)


@pytest.mark.slow
def test_curves_in_single_precision_are_torchs_and_pass_on_what_is_no_number() -> None:
    curves = [nn.Tanh(), nn.GELU()]
    library, numbers = library_of([(curve, (1,)) for curve in curves], torch.float32, chunk=400)
    ends = torch.tensor([-1e30, -99, 0, 99, 1e30, torch.nan])
    x, nothing = torch.cat([torch.linspace(-12, 12, 394), ends]), torch.zeros(1)
    alike = partial(torch.testing.assert_close, rtol=1e-6, atol=2e-6, equal_nan=True)
    for which, curve in zip(numbers, curves, strict=True):
        y, gy, gx = torch.zeros(400), torch.ones(400), torch.zeros(400)
        library.run_seed(which, 1, *map(address, (nothing, x, y, gy, gx, nothing)))
        wanted = x.double().requires_grad_()
        slope = torch.autograd.grad(curve(wanted).sum(), wanted)[0]
        alike(y.double(), curve(wanted).detach())
        alike(gx.double(), slope)


@pytest.mark.slow
def test_libraries_are_for_the_processor_that_runs_them_where_a_compiler_knows_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = find_compiler()
    flags, processor = build.own_processor(str(real))
    if not flags:
        pytest.skip("this compiler does not know its processor")
    assert "__cplusplus" in processor
    plain = tmp_path / "c++"
    plain.write_text(f'#!/bin/sh\ncase "$*" in *native*) exit 1;; esac\nexec {real} "$@"\n')
    plain.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.own_processor(str(plain)) == ([], platform.machine())
    layer, shape = nn.Linear(3, 2), (3,)
    library, (which,) = library_of([(layer, shape)], torch.float64)
    assert_equal_to_module(library, which, layer, shape, torch.Generator().manual_seed(0))
    assert len(list(tmp_path.glob("esper/chip/*.so"))) == 1


MIXED = [
    ("mlp", Isolation.DUAL_PASS, Sgd(), 0),
    ("mlp", Isolation.STRAIGHT_THROUGH, AdamW(), 1),
    ("conv1d", Isolation.DUAL_PASS, AdamW(), 0),
    ("conv1d", Isolation.STRAIGHT_THROUGH, Sgd(), 1),
    ("gelu", Isolation.DUAL_PASS, AdamW(), 0),
    pytest.param("tanh", Isolation.STRAIGHT_THROUGH, Sgd(), 1, marks=pytest.mark.nightly),
    ("folded", Isolation.DUAL_PASS, AdamW(), 0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "isolation", "optimiser", "draw"), MIXED)
def test_a_mixed_population_on_chip_equals_its_reference_trainers_over_many_epochs(
    name: str, isolation: Isolation, optimiser: RowOptimiser, draw: int
) -> None:
    rate = 0.01 if isinstance(optimiser, AdamW) else 0.05
    population = make_population(
        name, 7, batches=2, isolation=isolation, optimiser=optimiser, rate=rate, decay=0.02,
        backend="chip",
    )  # fmt: skip
    twins = Twins(population)
    stages: set[int] = set()
    for epoch in range(9):
        draws = partial(own_draws, population, 100 * draw + epoch)
        twins.apply(draw_actions(population.legal(), draws))
        losses, gradients, scores = twins.epoch()
        record = population.train_epoch()
        torch.testing.assert_close(record.loss, losses, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(
            record.seed_gradient, gradients, rtol=1e-8, atol=1e-12, equal_nan=True
        )
        torch.testing.assert_close(population.evaluate().accuracy, scores.double())
        stages |= set(population.lifecycle.stage.flatten().tolist())
        population.pass_time()
        for each in twins.hosts:
            each.pass_time()
    assert twins.difference() < 1e-9
    assert len(stages) >= 6, "the draw should visit most stages"


def own_draws(population: Population, step: int, purpose: str) -> Tensor:
    return uniform(population.seeds, f"test {purpose}", step, 16)


GROWN = [
    (name, list(Isolation)[(number + int(blend)) % 2], blend)
    for number, name in enumerate(FAMILY)
    for blend in Blend
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "isolation", "blend"), GROWN)
def test_every_blueprint_on_chip_equals_the_fused_one_in_every_stage(
    name: str, isolation: Isolation, blend: Blend
) -> None:
    count = len(blueprint_names(FAMILY[name]))
    chip, fused = (
        make_population(name, count, batches=1, isolation=isolation, backend=backend)
        for backend in ("chip", "fused")
    )

    def live(script: dict[int, LifecycleOp], epochs: int) -> None:
        for epoch in range(epochs):
            if epoch in script:
                actions = Actions.of(
                    chip.space,
                    count,
                    op=int(script[epoch]),
                    slot=torch.arange(count) % 3,
                    blueprint=torch.arange(count),
                    blend=int(blend),
                )
                chip.apply(actions)
                fused.apply(actions)
            ours, theirs = chip.train_epoch(), fused.train_epoch()
            torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-9, atol=1e-12)
            assert_alike(chip, fused)
            chip.pass_time()
            fused.pass_time()

    advance = {} if blend is Blend.IMMEDIATE else {2: LifecycleOp.ADVANCE}
    live({0: LifecycleOp.GERMINATE} | advance, 6)
    before = fused.snapshot()
    for population in (chip, fused):  # one format: a run may change its backend
        population.put_rows(torch.arange(count), before)
    live({0: LifecycleOp.FOSSILIZE}, 2)
    assert int(chip.lifecycle.at(SeedStage.FOSSILIZED).sum()) == count
    for population in (chip, fused):
        population.put_rows(torch.arange(count), before)
    live({0: LifecycleOp.PRUNE}, 3)


def assert_alike(one: Population, other: Population) -> None:
    """All that the rows in use of two populations keep."""
    pools, others = (each.pools | each.shadows.pools for each in (one, other))
    assert set(pools) == set(others)
    for key in pools:
        ours, theirs = kept_in(pools[key]), kept_in(others[key])
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def kept_in(pool: Pool) -> dict[str, Tensor]:
    """All that its rows in use keep, in the order of their environments."""
    rows = pool.rows_in_use[pool.owner[pool.rows_in_use].argsort()]
    return {name: tensor[rows] for name, tensor in pool.tensors().items()}


def grown(name: str, epochs: int = 5, **settings: object) -> Population:
    """A population whose rows hold different seeds in different stages."""
    population = make_population(name, 6, **settings)  # type: ignore[arg-type]
    for epoch in range(epochs):
        draws = partial(own_draws, population, epoch)
        population.apply(draw_actions(population.legal(), draws))
        population.train_epoch()
        population.pass_time()
    return population


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "conv1d", "folded"])
def test_scores_without_some_seeds_equal_the_fused_ones(name: str) -> None:
    fused, chip = (grown(name, epochs=9, backend=backend) for backend in ("fused", "chip"))
    chip.put_rows(torch.arange(6), fused.snapshot())
    subsets = torch.cartesian_prod(*[torch.tensor([False, True])] * 3)
    environment = torch.arange(6).repeat_interleave(len(subsets))
    off = subsets.repeat(6, 1)
    ours, theirs = (each.counterfactual(environment, off) for each in (chip, fused))
    assert len(ours.loss.unique()) > 12, "seeds should matter"
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.accuracy, theirs.accuracy)
    ours, theirs = (each.evaluate("test", committed=True) for each in (chip, fused))
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-10, atol=1e-12)
    flows = (each.flow() for each in (chip, fused))  # the fused one in single precision
    torch.testing.assert_close(*flows, rtol=2e-5, atol=1e-6, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "conv1d", "folded"])
def test_shadows_on_chip_equal_the_fused_ones_and_leave_hosts_alone(name: str) -> None:
    fused, chip = (grown(name, epochs=4, backend=backend) for backend in ("fused", "chip"))
    alone, before = grown(name, epochs=0, backend="chip"), fused.snapshot()
    for population in (chip, fused, alone):
        population.put_rows(torch.arange(6), before)
    chance = torch.rand(chip.shadows.rows.shape, generator=torch.Generator().manual_seed(2))
    where = (chance < 0.5) & chip.shadows.fits
    share = torch.tensor([1.0, 0.67, 0.34, 0.0, 1.0, 0.67])
    for _ in range(2):
        plan = AuditionPlan(where, share)
        ours, theirs = chip.train_epoch(plan), fused.train_epoch(plan)
        alone.train_epoch()
        assert torch.equal(ours.shadowed, theirs.shadowed)
        for population in (chip, fused, alone):
            population.pass_time()
    assert int(chip.shadows.living.sum()) > 10
    for key, pool in alone.pools.items():
        torch.testing.assert_close(kept_in(chip.pools[key]), kept_in(pool), rtol=0, atol=0)
    assert_alike(chip, fused)
    readings = zip(*(each.shadows.readings.arrays().items() for each in (chip, fused)), strict=True)
    for (kind, mine), (_, other) in readings:
        torch.testing.assert_close(
            mine, other, rtol=1e-7, atol=1e-9, equal_nan=True, msg=lambda m, kind=kind: kind + m
        )


@pytest.mark.slow
@each_host
def test_frozen_rows_silenced_weights_and_own_rates_are_kept_on_chip(name: str) -> None:
    chip, fused = (grown(name, epochs=3, backend=backend) for backend in ("chip", "fused"))
    before = fused.snapshot()
    for population in (chip, fused):
        population.put_rows(torch.arange(6), before)
        width = population.pools[HOST].template.width
        live = torch.rand(2, width, generator=torch.Generator().manual_seed(1)) < 0.7
        population.silence_rows(torch.tensor([1, 4]), live)
        population.set_rates(torch.tensor([0, 2]), rate=torch.tensor([0.02, 0.0]), decay=0.1)
        population.freeze_rows(torch.tensor([3]))
        still = population.pools[HOST].state.theta[3].clone()
        population.train_epoch()
        assert torch.equal(population.pools[HOST].state.theta[3], still)
        assert not bool(population.pools[HOST].state.theta[[1, 4]][~live].any())
    assert_alike(chip, fused)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", pytest.param("conv1d", marks=pytest.mark.nightly)])
def test_a_host_of_the_garden_trains_an_epoch_in_single_precision_as_the_reference_does(
    name: str,
) -> None:
    draw = torch.Generator().manual_seed(0)
    label = torch.randint(10, (600,), generator=draw)
    inputs = torch.randn(600, 40, generator=draw) + torch.eye(10, 40)[label]
    parts = {
        split: Split(inputs[first : first + 200], label[first : first + 200])
        for first, split in zip((0, 200, 400), SPLITS, strict=True)
    }
    data = Splits(**parts, classes=10, origin="")
    found = []
    for backend, dtype in (
        ("chip", torch.float32),
        ("chip", torch.float32),
        ("fused", torch.float64),
    ):
        population = Population(
            partial(build_host, name),
            Feed([data], [0, 0, 0, 0], batch=50, batches=10, dtype=dtype),
            identities=range(4),
            config=PopulationConfig(backend=backend, dtype=dtype, rules=GateRules.unmeasured()),
        )
        actions = Actions.of(
            population.space,
            4,
            op=int(LifecycleOp.GERMINATE),
            slot=1,
            blueprint=torch.arange(4) + 1,
            blend=torch.tensor([Blend.IMMEDIATE] * 2 + [Blend.GATE] * 2),
        )
        population.apply(actions)
        population.train_epoch()
        found.append(torch.cat([pool.state.theta.flatten() for pool in population.pools.values()]))
    assert torch.equal(found[0], found[1]), "the same run twice is the same to the bit"
    torch.testing.assert_close(found[0].double(), found[2], rtol=1e-4, atol=1e-4)


def test_a_host_that_does_not_fit_is_refused_with_its_bytes() -> None:
    host = MlpHost(features=40, width=400)
    program = write_program(host, build_catalogue(host.slot_specs(), 1, ("norm",)), 40, 1)
    with pytest.raises(EsperError, match=r"given: \d+ bytes: 200000 parameters twice"):
        require_fitting(program, 200_000, 4, 232_448)
    with pytest.raises(BlueprintError, match=r'A SiLU cannot be computed on chip.*backend="fused"'):
        record(nn.Sequential(nn.Linear(4, 4), nn.SiLU()), (4,))
    with pytest.raises(EsperError, match="did you mean 'chip'"):
        make_population("mlp", 2, backend="chips")


@pytest.mark.parametrize("backend", ["fused", "chip"])
def test_what_is_to_be_done_beside_an_epoch_is_done_once_before_its_results_are_waited_for(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    population, seen = make_population("mlp", 2, batches=1, backend=backend), list[str]()
    fetched = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: (seen.append("waited"), fetched(self))[1])
    population.do_beside_epochs(lambda: seen.append("done"))
    population.train_epoch()
    assert seen.count("done") == 1
    assert seen.index("done") < seen.index("waited")


@pytest.mark.slow
def test_nothing_asked_for_means_fused_where_the_chip_cannot_be_or_does_not_pay(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PopulationConfig(compute_dtype=torch.bfloat16)
    assert "backend" not in repr(config), "results are kept under a name that does not have it"
    with caplog.at_level(logging.INFO, logger="esper"):
        assert [make_population("mlp", count).backend for count in (63, 64)] == ["fused", "chip"]
        assert make_population("mlp", 2, backend="chip").backend == "chip"
        assert not caplog.messages
        assert make_population("mlp", 64, compute_dtype=torch.bfloat16).backend == "fused"
        assert make_population("gpt", 64).backend == "fused"
        monkeypatch.setattr(build, "COMPILERS", ())
        build_library.cache_clear()
        assert make_population("mlp", 64).backend == "fused"
    told, beside, last = caplog.messages
    assert told.startswith("The population is computed by the fused backend. The chip backend")
    assert "compute_dtype torch.bfloat16" in told
    assert "cannot be computed on chip" in beside
    assert "There is no C++ compiler" in last


def test_what_others_could_have_written_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home, text = tmp_path / "esper" / "chip", 'extern "C" int one() { return 1; }'
    library = build._kept("so", lambda draft: draft.write_bytes(b"mine"), text)
    assert library.parent == home
    assert home.stat().st_mode & 0o777 == 0o700
    home.chmod(0o770)
    with pytest.raises(EsperError, match="nobody else can write") as refused:
        build._kept("so", lambda draft: draft.write_bytes(b"mine"), text)
    assert str(home) in str(refused.value)
    home.chmod(0o755)  # others may read
    assert build._kept("so", lambda draft: draft.write_bytes(b"other"), text) == library
    assert library.read_bytes() == b"mine"
    monkeypatch.setattr(os, "getuid", lambda: home.stat().st_uid + 1)
    with pytest.raises(EsperError, match="nobody else can write"):
        build._kept("so", lambda draft: draft.write_bytes(b"mine"), text)
