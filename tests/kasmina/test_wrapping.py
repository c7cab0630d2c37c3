"""Slots on models as people write them: what may change and what may not, to the bit."""

import copy

import pytest
import torch
from torch import nn

from esper.kasmina import Isolation, SlottedModel, Target
from esper.leyline import SeedStage
from esper.leyline.errors import SlotError, UnknownNameError
from tests.kasmina.twins import (
    blueprint_for,
    condition,
    optimizer_for,
    outputs,
    random_states,
    require_same,
    seed_of,
    step,
    stir,
    throw,
    unequal,
    wrapped,
)
from tests.kasmina.zoo import ACCEPTED, Entry, tensors_in
from tests.kasmina.zoo_refused import REFUSED, Refused
from tests.nightly import thinned

STEPS = 2
PLACES = [(entry, index) for entry in ACCEPTED for index in range(len(entry.places))]

each_entry = pytest.mark.parametrize("entry", ACCEPTED, ids=lambda entry: entry.name)
# Every place, and every model with both isolations.
TRAINED = [
    (entry, index, isolation)
    for number, entry in enumerate(ACCEPTED)
    for index in range(len(entry.places))
    for which, isolation in enumerate(Isolation)
    if len(entry.places) == 1 or (number + index + which) % 2
]


def hooks_of(model: nn.Module) -> list[int]:
    return [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]


@each_entry
def test_wrapping_finds_what_passes_through_each_slot_and_changes_nothing(entry: Entry) -> None:
    plain, model = entry.model(), entry.model()
    sample = copy.deepcopy(entry.sample)
    throw(8)
    before = random_states()
    host = SlottedModel(model, entry.places, entry.sample)
    require_same(before, random_states(), "random states")
    found = [(spec.layout, spec.channels) for spec in host.specs]
    assert dict(zip(entry.places, found, strict=True)) == entry.accepted
    require_same(tensors_in(sample), tensors_in(entry.sample), "sample")
    require_same(condition(plain), condition(host), "the model")
    assert host.model is model
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [
        n for n, _ in plain.named_parameters()
    ]
    assert hooks_of(model) == hooks_of(plain)
    require_same(outputs(entry, plain), outputs(entry, host))


@pytest.mark.parametrize(
    ("entry", "index", "isolation"),
    thinned(TRAINED, 3),
    ids=[f"{entry.name}-{entry.places[i]}-{isolation}" for entry, i, isolation in TRAINED],
)
def test_a_host_does_not_notice_a_seed_that_trains(
    entry: Entry, index: int, isolation: Isolation
) -> None:
    plain, host = entry.model(), wrapped(entry, [entry.places[index]], isolation)
    optimizers = optimizer_for(plain), optimizer_for(host)
    [spec] = host.specs
    throw(8)
    before = random_states()
    host.germinate(spec.name, blueprint_for(spec, index), "gate" if index % 2 else "ramp")
    require_same(before, random_states(), "random states")
    seed = seed_of(host, 0)
    born = [parameter.detach().clone() for parameter in seed.parameters()]
    gradients = torch.zeros(())
    for number in range(STEPS):
        expected = step(entry, plain, optimizers[0], dice=number)
        require_same(expected, step(entry, host, optimizers[1], dice=number))
        require_same(
            condition(plain, optimizers[0]), condition(host, optimizers[1]), f"after step {number}"
        )
        gradients += sum(
            p.grad.abs().sum().float() for p in seed.parameters() if p.grad is not None
        )
    assert gradients > 0
    assert unequal(born, list(seed.parameters()))
    require_same(outputs(entry, plain), outputs(entry, host))


@pytest.mark.parametrize(
    ("entry", "index"),
    thinned(PLACES, 3),
    ids=[f"{entry.name}-{entry.places[i]}" for entry, i in PLACES],
)
def test_a_blended_seed_takes_part_and_can_be_left_out(entry: Entry, index: int) -> None:
    plain, host = entry.model(), wrapped(entry, [entry.places[index]])
    [spec] = host.specs
    host.germinate(spec.name, blueprint_for(spec, index), "immediate")
    expected = outputs(entry, plain)
    pairs = list(zip(expected, outputs(entry, host), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs), "a newborn seed adds exactly zero"

    stir(seed_of(host, 0))
    assert unequal(expected, outputs(entry, host))
    with host.without(spec.name):
        require_same(expected, outputs(entry, host))

    throw(0)
    entry.loss(entry.run(plain)).backward()
    throw(0)
    entry.loss(entry.run(host)).backward()
    reached = {name for name, p in plain.named_parameters() if p.grad is not None}
    assert reached == {name for name, p in host.model.named_parameters() if p.grad is not None}
    assert any(bool(p.grad.any()) for p in host.model.parameters() if p.grad is not None)
    assert all(
        p.grad is not None and p.grad.isfinite().all() for p in seed_of(host, 0).parameters()
    )
    assert any(bool(p.grad.any()) for p in seed_of(host, 0).parameters())


@each_entry
def test_pruning_a_seed_that_was_never_blended_changes_no_bit(entry: Entry) -> None:
    plain, host = entry.model(), wrapped(entry)
    optimizers = optimizer_for(plain), optimizer_for(host)
    for index, spec in enumerate(host.specs):
        host.germinate(spec.name, blueprint_for(spec, index))
    step(entry, plain, optimizers[0], dice=1)
    step(entry, host, optimizers[1], dice=1)
    kept = {id(p): s for p, s in optimizers[1].state.items()}
    survivor = {n: p.detach().clone() for n, p in host.slots[-1].named_parameters()}
    for spec in host.specs[:-1]:
        host.prune(spec.name)
    assert all(kept[id(p)] is state for p, state in optimizers[1].state.items())
    require_same(survivor, dict(host.slots[-1].named_parameters()), "the surviving seed")
    host.prune(host.specs[-1].name)
    assert hooks_of(host.model) == hooks_of(plain)
    require_same(outputs(entry, plain), outputs(entry, host))
    require_same(
        step(entry, plain, optimizers[0], dice=2), step(entry, host, optimizers[1], dice=2)
    )
    require_same(condition(plain, optimizers[0]), condition(host, optimizers[1]))


@each_entry
def test_a_faded_seed_leaves_without_a_trace(entry: Entry) -> None:
    host = wrapped(entry)
    optimizer = optimizer_for(host)
    spec = host.specs[0]
    host.germinate(spec.name, blueprint_for(spec), "immediate")
    step(entry, host, optimizer, dice=1)
    host.prune(spec.name)
    assert host.seed_slots[spec.name].stage is SeedStage.PRUNED
    step(entry, host, optimizer, dice=2)
    before = condition(host, optimizer)
    with host.without(spec.name):
        expected = outputs(entry, host)
    host.pass_time()
    assert host.seed_slots[spec.name].stage is SeedStage.EMBARGOED
    require_same(before, condition(host, optimizer))
    require_same(expected, outputs(entry, host))


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.name)
def test_what_cannot_be_right_is_refused_with_the_reason(entry: Refused) -> None:
    untouched, model = entry.model(), entry.model()
    hooks = hooks_of(model)
    modes = [part.training for part in model.modules()]
    throw(8)
    before = random_states()
    with pytest.raises((SlotError, UnknownNameError)) as refusal:
        SlottedModel(model, entry.places, entry.sample)
    assert entry.reason in str(refusal.value)
    assert refusal.value.fix, "what to do about it"
    assert str(refusal.value).endswith((".", "?"))
    require_same(before, random_states(), "random states")
    assert hooks_of(model) == hooks
    assert [part.training for part in model.modules()] == modes
    require_same(entry.outputs(untouched), entry.outputs(model))


def test_places_and_sample_must_be_given() -> None:
    with pytest.raises(SlotError, match="need places and a sample"):
        SlottedModel(nn.Linear(2, 2))


def test_slot_names_must_differ() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with pytest.raises(SlotError, match="names must differ"):
        SlottedModel(model, [Target("0", name="x"), Target("1", name="x")], torch.ones(2, 3))


def test_most_of_the_zoo_is_accepted() -> None:
    assert len(ACCEPTED) > len(REFUSED)
