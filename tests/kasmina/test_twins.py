"""The blueprint `twin`: one more of the block before the slot, wherever a copy can follow it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.kasmina import (
    SlottedModel,
    build_host,
    export_module,
    export_onnx,
    export_program,
    export_python,
)
from esper.kasmina.hosts import Block
from esper.kasmina.slot import Slot
from esper.leyline.errors import EsperError
from tests.kasmina.grown_hosts import RULES, plant

IMAGES = torch.randn(3, 1, 6, 6, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(1))


class Residual(nn.Module):
    """What a body adds to its input, or what `last` makes of the sum."""

    def __init__(self, body: nn.Module, last: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.last = body, last or nn.Identity()

    def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
        thought: Tensor = self.last(x + self.body(x))
        return thought if scale is None else scale * thought


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.conv = nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        thought: Tensor = self.conv(self.act(x))
        return x + thought


class Scaled(nn.Module):
    """Hands its block more than the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Residual(nn.Conv2d(4, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.block(x, scale=2.0)
        return scaled


def body() -> nn.Sequential:
    first, last = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
    return nn.Sequential(first, nn.ReLU(), last, nn.BatchNorm2d(4))


def cnn(block: nn.Module) -> nn.Module:
    head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, 3))
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), block, head)


def gpt() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8), Block(8, heads=2), nn.Linear(8, 11))


def twinned(model: nn.Module, sample: Tensor) -> SlottedModel:
    host = SlottedModel(model, ["1"], sample, rules=RULES)
    plant(host, "1", "twin")
    host.fossilize("1")
    return host.eval()


def hooked() -> nn.Module:
    block = Residual(body())
    block.register_forward_hook(lambda *_: None)
    return block


FITS = {
    "a residual block": (Residual(nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh())), True),
    "one with batch statistics": (Residual(body()), True),
    "one with a ReLU behind the sum": (Residual(body(), nn.ReLU()), True),
    "a convolution and a ReLU": (nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), False),
    "a norm behind the sum": (Residual(body(), nn.BatchNorm2d(4)), False),
    "a branch that would never learn": (Residual(nn.Sequential(body(), nn.ReLU())), False),
    "a block that works in place": (InPlace(), False),
    "one with a hook of the user's": (hooked(), False),
    "a single layer": (nn.Conv2d(4, 4, 1), False),
}


@pytest.mark.parametrize("name", FITS)
def test_a_twin_fits_behind_residual_blocks_that_a_copy_can_follow(name: str) -> None:
    block, fits = FITS[name]
    state = copy.deepcopy(block.state_dict())
    places = {place.path: place for place in esper.inspect(cnn(block), IMAGES).places}
    assert ("twin" in places["1"].options) == fits
    if fits:
        assert places["1"].options["twin"] == sum(p.numel() for p in block.parameters())
    assert "block" in places["1"].options
    assert all(torch.equal(now, state[key]) for key, now in block.state_dict().items())


def test_a_block_that_gets_more_than_activations_has_no_twin() -> None:
    places = {place.path: place for place in esper.inspect(cnn(Scaled()), IMAGES).places}
    assert "twin" not in places["1.block"].options


def test_a_twin_begins_with_what_its_block_has_learned_but_for_the_last_layer() -> None:
    block = Residual(body(), nn.ReLU())
    host = SlottedModel(cnn(block), ["1"], IMAGES, rules=RULES).eval()
    before, learned, stream = host(IMAGES), block.state_dict(), torch.get_rng_state()
    host.germinate("1", "twin", "immediate")
    assert torch.equal(before, host(IMAGES))
    assert torch.equal(stream, torch.get_rng_state())
    slot = host.slots[0]
    assert isinstance(slot, Slot)
    assert slot.seed is not None
    grown = slot.seed.get_submodule("body.transform.module").state_dict()
    silent = {"body.3.weight", "body.3.bias"}
    assert not any(bool(grown[key].any()) for key in silent)
    for key, value in learned.items():
        assert key in silent or torch.equal(grown[key], value)


def test_a_causal_block_has_a_causal_twin() -> None:
    host = twinned(gpt(), TOKENS)
    later = TOKENS.clone()
    later[:, 3:] = (later[:, 3:] + 1) % 11
    assert torch.equal(host(TOKENS)[:, :3], host(later)[:, :3])
    assert not torch.equal(host(TOKENS)[:, 3:], host(later)[:, 3:])


def test_a_twin_is_rebuilt_from_a_saved_state_and_copied_with_its_host() -> None:
    host = twinned(cnn(Residual(body())), IMAGES)
    other = SlottedModel(cnn(Residual(body())), ["1"], IMAGES, rules=RULES).eval()
    other.load_state_dict(host.state_dict())
    assert torch.equal(other(IMAGES), host(IMAGES))
    assert torch.equal(copy.deepcopy(host)(IMAGES), host(IMAGES))


def test_a_grown_twin_exports_in_every_format(tmp_path: Path) -> None:
    host = twinned(cnn(Residual(body(), nn.ReLU())), IMAGES)
    assert torch.equal(export_module(host, IMAGES)(IMAGES), host(IMAGES))
    # Each compares what it wrote with the host before it returns.
    export_program(host, IMAGES, tmp_path / "program.pt2")
    export_python(host, IMAGES, tmp_path / "python")
    export_onnx(host, IMAGES, tmp_path / "network.onnx")


def test_own_hosts_offer_what_they_always_did_and_more_only_if_named() -> None:
    names = SlottedModel(build_host("gpt")).catalogue.names
    assert names == ("norm", "lora", "gate", "attention", "mlp")
    named = SlottedModel(build_host("gpt"), blueprints=[*names, "block"]).catalogue
    assert all(row[-1] > row[-2] for row in named.costs)
    assert SlottedModel(gpt(), ["1"], TOKENS).catalogue.names == (*names, "block", "twin")


def test_a_controller_of_the_fixed_space_says_what_to_give() -> None:
    blocks = [nn.Sequential(nn.Conv1d(n, 4, 3, padding=1), nn.ReLU()) for n in (1, 4, 4)]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(40, 3))
    sample = torch.randn(3, 1, 10)
    settings: dict[str, Any] = {"slots": ["0", "1", "2"], "budget": esper.Budget(epochs=9)}
    with pytest.raises(EsperError, match=r"give blueprints=\['norm', 'squeeze', ") as told:
        esper.wrap(model, sample, **settings).require_controller("specialist")
    given = str(told.value).partition("blueprints=[")[2].partition("]")[0]
    names = [name.strip("' ") for name in given.split(",")]
    fitting = esper.wrap(model, sample, blueprints=names, **settings)
    assert fitting.require_controller("specialist").name == "specialist"
