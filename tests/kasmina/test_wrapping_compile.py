"""Compiled code and slots: a seed that comes or goes is never missed."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import Isolation, SlottedModel
from tests.kasmina.twins import blueprint_for, require_same, seed_of, stir, throw, wrapped
from tests.kasmina.zoo import ACCEPTED, Entry, tensors_in

BY_NAME = {entry.name: entry for entry in ACCEPTED}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compile_whole(host: SlottedModel) -> Callable[..., object]:
    return torch.compile(host, backend="eager")


def compile_in_place(host: SlottedModel) -> Callable[..., object]:
    host.compile(backend="eager")
    return host


def compile_inner(host: SlottedModel) -> Callable[..., object]:
    host.model.compile(backend="eager")
    return host


def outputs(entry: Entry, model: Callable[..., object]) -> list[Tensor]:
    throw(5)
    return [tensor.detach().clone() for tensor in tensors_in(entry.run(model))]


def gradients(entry: Entry, host: SlottedModel, model: Callable[..., object]) -> dict[str, Tensor]:
    host.zero_grad()
    throw(6)
    entry.loss(entry.run(model)).backward()
    if host.has_isolated_seeds:
        with host.seed_pass():
            entry.loss(entry.run(model)).backward()
    return {n: p.grad.clone() for n, p in host.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "way", "isolation"),
    [
        ("mlp", compile_whole, Isolation.DUAL_PASS),
        pytest.param(
            "transformer encoder, time first",
            compile_whole,
            Isolation.DUAL_PASS,
            marks=pytest.mark.nightly,
        ),
        ("resnet basic", compile_whole, Isolation.STRAIGHT_THROUGH),
        ("dict output", compile_in_place, Isolation.DUAL_PASS),
        ("gpt", compile_in_place, Isolation.STRAIGHT_THROUGH),
        ("mlp", compile_inner, Isolation.DUAL_PASS),
        pytest.param(
            "resnet basic",
            compile_inner,
            Isolation.STRAIGHT_THROUGH,
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_compiled_code_follows_a_seed_through_its_life(
    name: str, way: Callable[[SlottedModel], Callable[..., object]], isolation: Isolation
) -> None:
    entry = BY_NAME[name]
    eager = wrapped(entry, [entry.places[0]], isolation).eval()
    host = copy.deepcopy(eager)
    compiled = way(host)
    [spec] = host.specs

    def require_agreement(stage: str) -> None:
        require_same(outputs(entry, eager), outputs(entry, compiled), stage)

    require_agreement("before planting")
    for each in (eager, host):
        each.germinate(spec.name, blueprint_for(spec))
    require_agreement("planted")
    require_same(gradients(entry, eager, eager), gradients(entry, host, compiled), "gradients")
    for each in (eager, host):
        stir(seed_of(each, 0))
        each.pass_time()
        each.advance(spec.name)
    before = outputs(entry, eager)
    require_agreement("blending")
    for each in (eager, host):
        for _ in range(each.rules.blend_tempo):
            each.pass_time()
    require_agreement("holding")
    assert any(not torch.equal(a, b) for a, b in zip(before, outputs(entry, compiled), strict=True))
    require_same(gradients(entry, eager, eager), gradients(entry, host, compiled), "gradients")
    with eager.without(spec.name), host.without(spec.name):
        require_agreement("left out")
    for each in (eager, host):
        each.remove_now(spec.name)
    require_agreement("pruned")


def test_a_seed_planted_before_the_first_compilation_can_go() -> None:
    entry = BY_NAME["mlp"]
    host, plain = wrapped(entry, ["1"]), entry.model()
    host.germinate("1", "mlp", "immediate")
    stir(seed_of(host, 0))
    compiled = torch.compile(host, backend="eager")
    require_same(outputs(entry, host), outputs(entry, compiled))
    host.remove_now("1")
    require_same(outputs(entry, plain), outputs(entry, compiled))


def test_a_compiled_part_beside_the_slots_runs_as_written_while_the_model_is_probed() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 2))
    model[2].compile(backend="eager")
    sample = torch.ones(3, 4)
    host = SlottedModel(model, ["1"], sample)
    assert [len(part._forward_hooks) for part in model] == [0, 0, 0, 0]
    expected = host(sample)
    host.germinate("1", "mlp", "immediate")
    assert torch.equal(expected, host(sample))
    stir(seed_of(host, 0))
    assert not torch.equal(expected, host(sample))
