"""Copies, saved states and precisions of models with slots, over the zoo."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from esper.kasmina import Isolation, SlottedModel, export_module
from esper.leyline import SeedStage
from esper.leyline.errors import AgreementError
from tests.kasmina.grown_hosts import RULES, plant
from tests.kasmina.precisions import NARROW_LSTM
from tests.kasmina.twins import (
    blueprint_for,
    condition,
    optimizer_for,
    outputs,
    require_same,
    seed_of,
    step,
    stir,
    throw,
    unequal,
    wrapped,
)
from tests.kasmina.zoo import ACCEPTED, Entry, tensors_in
from tests.nightly import thinned
from tests.tolaria.reference import gradient_norms

BY_NAME = {entry.name: entry for entry in ACCEPTED}

# What these remember is not in any module's state dict, with or without Esper.
FORGETFUL = {"stateful rnn", "stochastic depth by own"}
SAVED = [entry for entry in ACCEPTED if entry.name not in FORGETFUL]


# --- deep copies -----------------------------------------------------------------------------


@pytest.mark.parametrize("entry", thinned(ACCEPTED, 3), ids=lambda entry: entry.name)
def test_a_copy_grows_and_learns_on_its_own(entry: Entry) -> None:
    host = wrapped(entry)
    bare, young = outputs(entry, host), copy.deepcopy(host)
    for index, spec in enumerate(young.specs):
        young.germinate(spec.name, blueprint_for(spec), "immediate")
        stir(seed_of(young, index))
    assert unequal(bare, outputs(entry, young))
    require_same(bare, outputs(entry, host))

    spec = host.specs[0]
    host.germinate(spec.name, blueprint_for(spec), "immediate")
    stir(seed_of(host, 0))
    before, state = outputs(entry, host), copy.deepcopy(host.state_dict())
    twin = copy.deepcopy(host)
    require_same(before, outputs(entry, twin))

    step(entry, twin, optimizer_for(twin), dice=1)
    stir(seed_of(twin, 0))
    assert unequal(before, outputs(entry, twin))
    with twin.without(spec.name):
        require_same(before, outputs(entry, host))
    twin.remove_now(spec.name)
    require_same(before, outputs(entry, host))
    require_same(state, host.state_dict(), "the original's state")
    assert host.slots[0].seed is not None


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_host_that_keeps_a_computed_weight_can_be_copied_and_exported(
    norm: Callable[[nn.Module], nn.Module],
) -> None:
    """Torch's older norms of weights keep one that has a history, which deepcopy refuses."""
    sample = torch.linspace(-1, 1, 24).view(4, 6)
    model = nn.Sequential(norm(nn.Linear(6, 8)), nn.ReLU(), norm(nn.Linear(8, 3))).eval()
    host = SlottedModel(model, ["0", "1"], sample, rules=RULES)
    for name in ("0", "1"):
        plant(host, name, "mlp")
        host.fossilize(name)
    expected = host(sample)
    twin = copy.deepcopy(host)
    assert torch.equal(twin(sample), expected)
    twin(sample).sum().backward()
    assert all(parameter.grad is None for parameter in host.parameters())
    assert torch.equal(export_module(host, sample)(sample), expected)


def test_a_host_and_its_optimiser_can_be_copied_together() -> None:
    entry = BY_NAME["mlp"]
    host = wrapped(entry)
    optimizer = optimizer_for(host)
    host.germinate("1", "mlp")
    step(entry, host, optimizer, dice=1)
    twin, its_optimizer = copy.deepcopy((host, optimizer))
    twin.germinate("2", "mlp")
    require_same(step(entry, host, optimizer, dice=2), step(entry, twin, its_optimizer, dice=2))
    twin.pass_time()
    assert len(its_optimizer.param_groups[0]["params"]) > len(optimizer.param_groups[0]["params"])


# --- saved states ----------------------------------------------------------------------------


def in_training(host: SlottedModel, slot: str) -> None:
    """Nothing to do."""


def in_blending(host: SlottedModel, slot: str) -> None:
    host.pass_time()
    host.advance(slot)


def in_holding(host: SlottedModel, slot: str) -> None:
    in_blending(host, slot)
    for _ in range(host.rules.blend_tempo):
        host.pass_time()


def fossilized(host: SlottedModel, slot: str) -> None:
    in_holding(host, slot)
    host.pass_time()
    host.fossilize(slot)


def fading(host: SlottedModel, slot: str) -> None:
    in_holding(host, slot)
    host.prune(slot)


def resting(host: SlottedModel, slot: str) -> None:
    host.prune(slot)


STAGES: dict[SeedStage, Callable[[SlottedModel, str], None]] = {
    SeedStage.TRAINING: in_training,
    SeedStage.BLENDING: in_blending,
    SeedStage.HOLDING: in_holding,
    SeedStage.FOSSILIZED: fossilized,
    SeedStage.PRUNED: fading,
    SeedStage.EMBARGOED: resting,
}
CASES = [
    (entry, list(STAGES)[number % len(STAGES)], list(Isolation)[number % 2])
    for number, entry in enumerate(SAVED)
]
EVERY_STAGE = [(BY_NAME["resnet basic"], stage, i) for stage in STAGES for i in Isolation]


@pytest.mark.parametrize(
    ("entry", "stage", "isolation"),
    EVERY_STAGE + thinned(CASES, 3),
    ids=[
        f"{entry.name}-{stage.name}-{isolation}" for entry, stage, isolation in EVERY_STAGE + CASES
    ],
)
def test_a_saved_state_continues_to_the_bit(
    entry: Entry, stage: SeedStage, isolation: Isolation
) -> None:
    host = wrapped(entry, isolation=isolation)
    optimizer = optimizer_for(host)
    for index in reversed(range(len(host.specs))):  # planted in another order than the slots have
        host.germinate(host.specs[index].name, blueprint_for(host.specs[index], index))
    step(entry, host, optimizer, dice=1)
    STAGES[stage](host, host.specs[0].name)
    assert host.seed_slots[host.specs[0].name].stage is stage
    step(entry, host, optimizer, dice=2)

    twin = wrapped(entry, isolation=isolation, start=2)
    its_optimizer = optimizer_for(twin)
    twin.germinate(twin.specs[0].name, blueprint_for(twin.specs[0], 1))  # will give way
    twin.load_state_dict(copy.deepcopy(host.state_dict()))
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    require_same(outputs(entry, host), outputs(entry, twin))
    for dice in (3, 4):
        expected = step(entry, host, optimizer, dice=dice)
        require_same(expected, step(entry, twin, its_optimizer, dice=dice))
    require_same(condition(host, optimizer), condition(twin, its_optimizer))
    require_same(host.state_dict(), twin.state_dict(), "states")


def test_a_state_of_other_slots_or_of_a_plain_model_is_refused() -> None:
    entry = BY_NAME["mlp"]
    host = wrapped(entry)
    before = copy.deepcopy(host.state_dict())
    with pytest.raises(AgreementError, match="disagree on \\(hosts, slots\\)"):
        host.load_state_dict(wrapped(entry, ["1"]).state_dict())
    with pytest.raises(AgreementError, match="not the state of a model with slots"):
        host.load_state_dict(entry.model().state_dict())
    require_same(before, host.state_dict())


# --- precisions ------------------------------------------------------------------------------

MIXED = ["mlp", "resnet basic", "unet", pytest.param("lstm classifier", marks=NARROW_LSTM), "gpt",
         "convnext", "tcn"]  # fmt: skip
WIDE = ["mlp", "resnet basic", "word language model", "vision transformer", "tcn", "vae"]


@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.parametrize("name", MIXED)
def test_autocast_trains_seeds_and_leaves_the_host_alone(name: str, isolation: Isolation) -> None:
    """Both passes in one autocast region, where torch keeps the cast weights of the first."""
    entry = BY_NAME[name]
    plain, host = entry.model(), wrapped(entry, isolation=isolation)
    for index, spec in enumerate(host.specs):
        host.germinate(spec.name, blueprint_for(spec, index))
    for model in (plain, host):
        throw(3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            entry.loss(entry.run(model)).backward()
            if isinstance(model, SlottedModel) and model.has_isolated_seeds:
                with model.seed_pass():
                    entry.loss(entry.run(model)).backward()
    require_same(condition(plain), condition(host))
    assert set(gradient_norms(host)) == {spec.name for spec in host.specs}
    assert all(norm > 0 for norm in gradient_norms(host).values())


@pytest.mark.parametrize("name", MIXED)
def test_a_blended_seed_runs_under_autocast_and_keeps_the_hosts_precision(name: str) -> None:
    entry = BY_NAME[name]
    plain, host = entry.model(), wrapped(entry)
    for index, spec in enumerate(host.specs):
        host.germinate(spec.name, blueprint_for(spec, index), "immediate")
        stir(seed_of(host, index))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grown = entry.run(host)
        expected = [tensor.dtype for tensor in tensors_in(entry.run(plain))]
        assert [tensor.dtype for tensor in tensors_in(grown)] == expected
        entry.loss(grown).backward()
    assert all(norm > 0 for norm in gradient_norms(host).values())


def in_precision(entry: Entry, dtype: torch.dtype) -> Entry:
    def cast(value: object) -> object:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    sample = entry.sample
    whole = isinstance(sample, torch.Tensor)
    cast_sample = cast(sample) if whole else tuple(cast(value) for value in sample)
    return Entry(entry.name, lambda: entry.build().to(dtype), cast_sample, entry.accepted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WIDE)
def test_a_seed_has_the_precision_of_its_host(name: str, dtype: torch.dtype) -> None:
    entry = in_precision(BY_NAME[name], dtype)
    host = wrapped(entry)
    optimizer = optimizer_for(host)
    for index, spec in enumerate(host.specs):
        host.germinate(spec.name, blueprint_for(spec, index))
        assert {p.dtype for p in seed_of(host, index).parameters()} == {dtype}
    step(entry, host, optimizer, dice=1)
    assert all(norm > 0 for norm in gradient_norms(host).values())


def test_seeds_move_with_the_host_to_another_precision() -> None:
    entry = BY_NAME["mlp"]
    host = wrapped(entry)
    host.germinate("1", "mlp", "immediate")
    host.double()
    host.germinate("2", "mlp", "immediate")
    assert {p.dtype for p in host.parameters()} == {torch.float64}
    assert host(entry.sample.double()).dtype == torch.float64


def test_a_norm_in_float32_inside_a_bfloat16_model_carries_a_seed() -> None:
    entry = BY_NAME["mixed precision"]
    host = wrapped(entry)
    host.germinate("norm", "mlp", "immediate")
    stir(seed_of(host, 1))
    output = host(entry.sample)
    assert output.dtype == torch.bfloat16
    output.float().square().mean().backward()
    assert gradient_norms(host)["norm"] > 0
