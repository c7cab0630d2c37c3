"""Networks as people write them, and awkward ones, from wrapping to export, to the bit.

Every module of the zoo goes through the calls that people use. Where no places are named, Esper
finds some or says why it cannot; what it does never shows in an output before a seed blends.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.optim import SGD

import esper
from esper.api import GrowingModel
from esper.kasmina import GateRules, Target
from esper.leyline import SeedStage
from esper.leyline.errors import EsperError
from tests.kasmina.twins import (
    blueprint_for,
    condition,
    outputs,
    require_same,
    seed_of,
    step,
    stir,
    throw,
    unequal,
)
from tests.kasmina.zoo import ACCEPTED, Entry, tensors_in
from tests.kasmina.zoo_refused import REFUSED, Refused
from tests.nightly import thinned

RULES = GateRules(
    min_gradient=None,
    min_contribution=None,
    max_loss_rise=None,
    min_holding_epochs=0,
    min_training_epochs=0,
    blend_tempo=2,
)
LEAST_MODULES, LEAST_ACCEPTED = 60, 30
# Of those with good places, "auto" leaves these four alone: what they have runs more than once in a
# pass, returns several tensors, or gives what the model returns.
NOT_BY_ITSELF = {"seq2seq", "siamese", "cell loop", "stateful rnn"}
# Of those with a place that is refused, these have no other.
NOWHERE = {
    "batch as long as time", "compiled model", "data parallel", "detached", "empty batch",
    "failing sample", "integers", "lazy", "list of lists", "no batch", "no parameters", "no_grad",
    "predictions only", "script", "script part", "slotted already", "slotted inside", "two paths",
    "volumes", "wrong arguments",
}  # fmt: skip


def wrapped(entry: Entry | Refused, slots: str | Sequence[str | Target]) -> GrowingModel:
    return esper.wrap(entry.model(), entry.sample, slots=slots, rules=RULES)


def plant(host: GrowingModel, blend: str) -> None:
    for index, spec in enumerate(host.specs):
        host.germinate(spec.name, blueprint_for(spec, index), blend)


# Every third: tests/kasmina/test_wrapping.py does the same to all of them, a level below.
@pytest.mark.parametrize("entry", ACCEPTED[::3], ids=lambda entry: entry.name)
def test_seeds_that_were_all_pruned_before_blending_never_were(entry: Entry) -> None:
    alone, host = entry.model(), wrapped(entry, entry.places)
    optimizers = SGD(alone.parameters(), 0.05, 0.9), host.optimizer(SGD, lr=0.05, momentum=0.9)
    require_same(outputs(entry, alone), outputs(entry, host), "outputs of a wrapped model")
    plant(host, "ramp")
    for dice in range(2):
        expected = step(entry, alone, optimizers[0], dice=dice)
        require_same(expected, step(entry, host, optimizers[1], dice=dice))
        host.pass_time()
    assert all(learns(host, index) for index in range(len(host.specs)))
    require_same(outputs(entry, alone), outputs(entry, host), "outputs at alpha 0")
    for spec in host.specs:
        host.prune(spec.name)
    for dice in range(2, 4):
        step(entry, alone, optimizers[0], dice=dice)
        step(entry, host, optimizers[1], dice=dice)
        host.pass_time()
    require_same(condition(alone, optimizers[0]), condition(host, optimizers[1]))
    require_same(outputs(entry, alone), outputs(entry, host))


def learns(host: GrowingModel, index: int) -> bool:
    """Did this seed receive a gradient in the last step?"""
    return any(p.grad is not None and bool(p.grad.any()) for p in seed_of(host, index).parameters())


@pytest.mark.parametrize("entry", thinned(ACCEPTED, 3), ids=lambda entry: entry.name)
def test_a_blended_out_seed_leaves_no_trace_and_a_permanent_one_is_exported(entry: Entry) -> None:
    host = wrapped(entry, entry.places)
    optimizer = host.optimizer(SGD, lr=0.01)
    without = outputs(entry, host)
    plant(host, "immediate")
    for index in range(len(host.specs)):
        stir(seed_of(host, index))
    assert unequal(without, outputs(entry, host)), "seeds that are on do something"
    leaving, staying = host.specs[0].name, [spec.name for spec in host.specs[1:]]
    for name in staying:
        host.fossilize(name)
    host.prune(leaving)
    while host.seed_slots[leaving].stage is SeedStage.PRUNED:
        step(entry, host, optimizer, dice=1)
        before = condition(host, optimizer)
        with host.without(leaving):
            expected = outputs(entry, host)
        host.pass_time()
    require_same(before, condition(host, optimizer), "the model when a seed is removed")
    require_same(expected, outputs(entry, host), "outputs when a seed is removed")
    exported = host.export()
    require_same(outputs(entry, host), outputs(entry, exported), "outputs of the export")
    assert not any(type(part).__module__.startswith("esper") for part in exported.modules())


def run(entry: Entry | Refused, model: nn.Module) -> list[torch.Tensor]:
    throw(3)
    return tensors_in(entry.run(model) if isinstance(entry, Entry) else entry.outputs(model))


@pytest.mark.parametrize("entry", [*ACCEPTED, *REFUSED], ids=lambda entry: entry.name)
def test_without_named_places_a_model_is_taken_unharmed_or_refused_with_a_sentence(
    entry: Entry | Refused,
) -> None:
    found = wrapped_or_refused(entry)
    alone = NOT_BY_ITSELF if isinstance(entry, Entry) else NOWHERE
    assert isinstance(found, EsperError) == (entry.name in alone), found
    if isinstance(found, EsperError):
        assert str(found).endswith((".", "?"))
        assert found.given is not None or found.fix is not None
    else:
        plant(found, "ramp")
        require_same(run(entry, entry.model()), run(entry, found))


def wrapped_or_refused(entry: Entry | Refused) -> GrowingModel | EsperError:
    try:
        return wrapped(entry, "auto")
    except EsperError as refusal:
        return refusal


def test_sixty_modules_and_more_are_tried_and_half_of_them_taken() -> None:
    names = {entry.name for entry in ACCEPTED}
    assert len(names | {entry.name for entry in REFUSED}) >= LEAST_MODULES
    assert len({entry.build for entry in ACCEPTED}) >= LEAST_ACCEPTED
