"""What every seed promises, over every blueprint x blend x isolation x stage."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina import (
    GateRules,
    Isolation,
    SlottedModel,
    blueprint_names,
    build_host,
    export_module,
)
from esper.kasmina.hosts import Conv1dHost, Conv2dHost, GptHost, MlpHost
from esper.kasmina.slot import Mode, Slot
from esper.leyline import Blend, Family, Layout, SeedStage, SlotSpec

RULES = GateRules(min_gradient=None, min_contribution=None, max_loss_rise=None)
LIVING_ON = (SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED, SeedStage.PRUNED)
SLOT = "early"

HOSTS: dict[Family, Callable[[], nn.Module]] = {
    Family.CONV1D: lambda: Conv1dHost(length=12, channels=4, kernel=3),
    Family.CONV2D: lambda: Conv2dHost(channels_in=1, size=8, widths=(4, 8, 8)),
    Family.DENSE: lambda: MlpHost(features=12, width=8),
    Family.TRANSFORMER: lambda: GptHost(vocabulary=11, width=8, heads=2, blocks=3, context=6),
}
BLUEPRINTS = [(family, name) for family in Family for name in blueprint_names(family)]
# Blueprints for wrapped models: one for images and one for tokens.
BLUEPRINTS += [(Family.CONV2D, "block"), (Family.TRANSFORMER, "block")]
each_blueprint = pytest.mark.parametrize(
    ("family", "name"), BLUEPRINTS, ids=[f"{family}-{name}" for family, name in BLUEPRINTS]
)
each_blend = pytest.mark.parametrize("blend", list(Blend), ids=lambda blend: blend.name)
each_isolation = pytest.mark.parametrize("isolation", list(Isolation))
# Every blueprint with each blend and with both isolations, and these with each other; a seed that
# is blended at once is never isolated.
CASES = [
    (*plan, blend, list(Isolation)[(number + int(blend)) % 2])
    for number, plan in enumerate(BLUEPRINTS)
    for blend in Blend
]
each_case = pytest.mark.parametrize(
    ("family", "name", "blend", "isolation"),
    CASES,
    ids=["-".join([family, name, blend.name, how]) for family, name, blend, how in CASES],
)
ISOLATED = [case for case in CASES if case[2] is not Blend.IMMEDIATE]
each_isolated_case = pytest.mark.parametrize(
    ("family", "name", "blend", "isolation"),
    ISOLATED,
    ids=["-".join([family, name, blend.name, how]) for family, name, blend, how in ISOLATED],
)
# Every blueprint at each stage and with each blend, and these with each other, but for a seed in
# BLENDING that was blended at once.
GROWN = [
    (*plan, blend, stage)
    for number, plan in enumerate(BLUEPRINTS)
    for at, stage in enumerate(LIVING_ON)
    for blend in [Blend((number + at) % 3 or (stage is SeedStage.BLENDING))]
]
each_grown_case = pytest.mark.parametrize(
    ("family", "name", "blend", "stage"),
    GROWN,
    ids=["-".join([family, name, blend.name, at.name]) for family, name, blend, at in GROWN],
)
# A fossil of a ramp is what one that was blended at once is: each stands for both in turn.
FOSSILS = [
    (*plan, blend)
    for number, plan in enumerate(BLUEPRINTS)
    for blend in (Blend.GATE, (Blend.IMMEDIATE, Blend.RAMP)[number % 2])
]


def make_host(
    family: Family, isolation: Isolation = Isolation.DUAL_PASS, name: str = "norm"
) -> SlottedModel:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = HOSTS[family]()
        return SlottedModel(model, rules=RULES, isolation=isolation, blueprints=[name])


def make_batch(family: Family) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    if family is Family.TRANSFORMER:
        tokens = torch.randint(11, (6, 7), generator=draw)
        return tokens[:, :-1], tokens[:, 1:]
    shape = {Family.CONV1D: (6, 12), Family.CONV2D: (6, 1, 8, 8), Family.DENSE: (6, 12)}[family]
    return torch.randn(shape, generator=draw), torch.randint(10, (6,), generator=draw)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def value_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    return loss_of(model, batch).item()


def step(
    host: SlottedModel, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
) -> None:
    optimizer.zero_grad()
    loss_of(host, batch).backward()
    if host.has_isolated_seeds:
        with host.seed_pass():
            loss_of(host, batch).backward()
    optimizer.step()


def tracked(host: SlottedModel, rate: float = 1e-3) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(host.parameters(), lr=rate)
    host.track(optimizer)
    return optimizer


def bits(tensor: Tensor) -> Tensor:
    """The raw bits, so that -0.0 differs from 0.0."""
    return tensor.detach().view(torch.int32)


def lead_to(host: SlottedModel, stage: SeedStage, name: str, blend: Blend) -> None:
    """Drive the early slot to a stage, by legal means only."""
    host.germinate(SLOT, name, blend)
    if blend is not Blend.IMMEDIATE:
        host.pass_time()
        host.advance(SLOT)
    if stage is not SeedStage.BLENDING:
        for _ in range(4):
            host.pass_time()
    if stage is SeedStage.FOSSILIZED:
        host.fossilize(SLOT)
    elif stage is SeedStage.PRUNED:
        host.prune(SLOT)
    assert host.seed_slots[SLOT].stage is stage


def disturb(host: SlottedModel) -> None:
    """Give every seed parameter a value as if it had learned something."""
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in host.slots.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)


@each_blueprint
@each_blend
def test_planting_keeps_the_function_until_blending_starts(
    family: Family, name: str, blend: Blend
) -> None:
    host, batch = make_host(family, name=name), make_batch(family)
    before = host(batch[0])
    host.germinate(SLOT, name, blend)
    if blend is Blend.IMMEDIATE:
        assert torch.equal(before, host(batch[0])), "alpha is 1, but the seed is exactly nothing"
    else:
        disturb(host)
        assert torch.equal(bits(before), bits(host(batch[0])))


@each_case
def test_gradient_reaches_every_seed_parameter_within_two_steps(
    family: Family, name: str, blend: Blend, isolation: Isolation
) -> None:
    host, batch = make_host(family, isolation, name), make_batch(family)
    optimizer = tracked(host)
    host.germinate(SLOT, name, blend)
    reached: set[str] = set()
    for _ in range(2):
        step(host, batch, optimizer)
        reached |= {
            parameter_name
            for parameter_name, parameter in host.slots.named_parameters()
            if parameter.grad is not None and bool((parameter.grad != 0).any())
        }
    assert reached == {parameter_name for parameter_name, _ in host.slots.named_parameters()}


@each_case
def test_a_seed_alone_lowers_the_loss_while_training(
    family: Family, name: str, blend: Blend, isolation: Isolation
) -> None:
    host, batch = make_host(family, isolation, name), make_batch(family)
    host.germinate(SLOT, name, blend)
    optimizer = torch.optim.SGD(host.slots.parameters(), lr=0.02)
    start = value_of(host, batch)
    for _ in range(12):
        step(host, batch, optimizer)
    if blend is Blend.IMMEDIATE:
        end = value_of(host, batch)
    else:
        with host.seed_pass(), torch.no_grad():
            end = value_of(host, batch)
    assert end < start


@each_isolated_case
def test_in_training_the_host_gets_exactly_the_gradient_of_the_unplanted_network(
    family: Family, name: str, blend: Blend, isolation: Isolation
) -> None:
    host, twin = make_host(family, isolation, name), make_host(family, name=name)
    batch = make_batch(family)
    host.germinate(SLOT, name, blend)
    disturb(host)
    step(host, batch, torch.optim.SGD(host.slots.parameters(), lr=0.0))
    loss_of(twin, batch).backward()
    for mine, theirs in zip(host.model.parameters(), twin.model.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(bits(mine.grad), bits(theirs.grad))
    assert all(parameter.requires_grad for parameter in host.parameters())


@each_grown_case
def test_after_training_both_learn_and_switching_off_gives_back_the_host(
    family: Family, name: str, blend: Blend, stage: SeedStage
) -> None:
    host, batch = make_host(family, name=name), make_batch(family)
    before = host(batch[0])
    lead_to(host, stage, name, blend)
    disturb(host)
    assert not torch.equal(host(batch[0]), before)
    with host.without(SLOT):
        assert torch.equal(bits(host(batch[0])), bits(before))
    loss_of(host, batch).backward()
    for parameter_name, parameter in host.named_parameters():
        assert parameter.grad is not None, f"{parameter_name} has no gradient in {stage.name}"
    start = value_of(host, batch)
    optimizer = torch.optim.Adam(host.parameters(), lr=3e-3)
    for _ in range(6):
        step(host, batch, optimizer)
    assert value_of(host, batch) < start


@each_blueprint
@each_blend
def test_removing_a_seed_at_alpha_zero_changes_no_bit(
    family: Family, name: str, blend: Blend
) -> None:
    host, batch = make_host(family, name=name), make_batch(family)
    optimizer = tracked(host)
    lead_to(host, SeedStage.PRUNED, name, blend)
    step(host, batch, optimizer)
    survivors = dict(host.model.named_parameters())
    states = {
        n: {k: v.clone() for k, v in optimizer.state[p].items()} for n, p in survivors.items()
    }
    weights = {n: p.detach().clone() for n, p in survivors.items()}
    with host.without(SLOT):
        at_zero = host(batch[0])
    while host.seed_slots[SLOT].stage is SeedStage.PRUNED:
        host.pass_time()
    assert not list(host.slots.parameters())
    assert torch.equal(bits(host(batch[0])), bits(at_zero))
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {
        id(p) for p in survivors.values()
    }
    assert len(optimizer.state) == len(survivors)
    for parameter_name, parameter in survivors.items():
        assert torch.equal(bits(parameter), bits(weights[parameter_name]))
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, states[parameter_name][key])


@each_blueprint
@each_isolation
def test_a_seed_pruned_before_it_blended_leaves_the_host_as_if_never_planted(
    family: Family, name: str, isolation: Isolation
) -> None:
    host, twin = make_host(family, isolation, name), make_host(family, name=name)
    batch = make_batch(family)
    mine, theirs = tracked(host), tracked(twin)
    for epoch in range(4):
        if epoch == 1:
            host.germinate(SLOT, name)
        if epoch == 3:
            host.prune(SLOT)
        step(host, batch, mine)
        step(twin, batch, theirs)
        host.pass_time()
    for a, b in zip(host.parameters(), twin.parameters(), strict=True):
        assert torch.equal(bits(a), bits(b))
    assert torch.equal(bits(host(batch[0])), bits(twin(batch[0])))


@pytest.mark.parametrize(("family", "name", "blend"), FOSSILS)
def test_a_fossilized_network_has_the_gradients_of_its_plain_export(
    family: Family, name: str, blend: Blend
) -> None:
    host, batch = make_host(family, name=name), make_batch(family)
    lead_to(host, SeedStage.FOSSILIZED, name, blend)
    disturb(host)
    plain = export_module(host, batch[0])
    assert torch.equal(bits(plain(batch[0])), bits(host(batch[0])))
    loss_of(host, batch).backward()
    loss_of(plain, batch).backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in host.named_parameters():
        if name.startswith("model."):
            twin = theirs.pop(name.removeprefix("model."))
        else:  # the seed's parameters end alike
            ending = name.partition("seed.")[2]
            (found,) = (key for key in theirs if key.endswith(f"seed.{ending}"))
            twin = theirs.pop(found)
        assert parameter.grad is not None
        assert twin.grad is not None
        assert torch.equal(parameter.grad, twin.grad), name
    assert not theirs


def test_an_idle_slot_returns_the_very_tensor_it_was_given() -> None:
    slot = Slot(SlotSpec(name="x", layout=Layout.DENSE, channels=3))
    h = torch.tensor([[-0.0, torch.inf, torch.nan]])
    assert slot(h) is h


def test_a_straight_through_slot_keeps_every_bit_even_when_the_seed_is_not_finite() -> None:
    host = SlottedModel(build_host("mlp"), rules=RULES, isolation=Isolation.STRAIGHT_THROUGH)
    host.germinate(SLOT, "mlp")
    with torch.no_grad():
        for parameter in host.slots.parameters():
            parameter.fill_(torch.inf)
    slot = host.slots[0]
    assert isinstance(slot, Slot)
    assert slot.mode is Mode.STRAIGHT
    h = torch.randn(2, 40)
    h[0, 0] = -0.0
    h[1, 1] = torch.inf
    assert torch.equal(bits(slot(h)), bits(h))


def test_a_dual_pass_leaves_batch_statistics_and_random_numbers_alone() -> None:
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 2)
    )
    x = torch.randn(5, 6)
    host = SlottedModel(model, ["0", "3"], x, rules=RULES)
    host.germinate("0", "mlp")
    host.germinate("3", "lowrank")
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    state = torch.get_rng_state()
    with host.seed_pass():
        first = host(x)
        first.sum().backward()
    with host.seed_pass():
        assert not torch.equal(first, host(x)), "each pass draws its own numbers"
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(buffers[n], b) for n, b in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in host.slots.parameters())


def test_the_same_plantings_give_the_same_seeds_whatever_the_random_state() -> None:
    hosts = []
    for start in range(2):
        torch.manual_seed(start)
        host = make_host(Family.DENSE, name="mlp")
        host.germinate(SLOT, "mlp")
        host.prune(SLOT)
        for _ in range(5):
            host.pass_time()
        host.germinate(SLOT, "mlp")
        hosts.append(copy.deepcopy(host.slots))
    for a, b in zip(hosts[0].parameters(), hosts[1].parameters(), strict=True):
        assert torch.equal(a, b)
