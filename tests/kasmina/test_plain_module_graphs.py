"""Esper's classes become graphs; users' classes do where a graph is certain to do the same."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from esper.kasmina import (
    ScalarGate,
    SlottedModel,
    Target,
    blueprint,
    export_module,
    unregister_blueprint,
    zeroed,
)
from esper.kasmina.layers import ChannelNorm, SelfAttention
from esper.leyline import ExportError, Layout
from tests.kasmina import export_models as models
from tests.kasmina.grown_hosts import RULES, grow, plant


class EsperInside(nn.Module):
    """A model of the user's that uses Esper's layers, and reaches into one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = ChannelNorm(6)
        self.attention = SelfAttention(6, inner=4, heads=2, causal=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.norm(x)) * self.norm.weight


class TraceableBody(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Linear(channels, channels)
        self.gate = ScalarGate()

    def forward(self, h: Tensor) -> Tensor:
        return self.gate(self.inner(h).relu())


class ModalBody(TraceableBody):
    """A graph would freeze the present mode."""

    def forward(self, h: Tensor) -> Tensor:
        return self.gate(F.dropout(self.inner(h), 0.5, self.training))


class NoisyBody(TraceableBody):
    """A graph would freeze the noise."""

    def forward(self, h: Tensor) -> Tensor:
        return self.gate(self.inner(h) * torch.rand(()))


class LuckyBody(TraceableBody):
    """A graph would freeze the choice."""

    def forward(self, h: Tensor) -> Tensor:
        return self.gate(self.inner(h) if random.random() < 0.5 else h)


class CountingBody(TraceableBody):
    """A graph would not count."""

    runs = 0

    def forward(self, h: Tensor) -> Tensor:
        self.runs += 1
        return self.gate(self.inner(h))


@pytest.fixture
def user_blueprint(request: pytest.FixtureRequest) -> Iterator[str]:
    blueprint("users_own", "dense")(lambda spec: request.param(spec.channels))
    yield "users_own"
    unregister_blueprint("users_own", "dense")


def grown_chain(name: str) -> tuple[SlottedModel, Tensor]:
    torch.manual_seed(0)
    sample = torch.randn(4, 6)
    host = SlottedModel(models.chain(), ["0", "2"], sample, rules=RULES)
    plant(host, "0", name)
    host.fossilize("0")
    return host, sample


@pytest.mark.parametrize("user_blueprint", [TraceableBody], indirect=True)
def test_a_users_blueprint_becomes_a_graph(user_blueprint: str) -> None:
    model = export_module(*grown_chain(user_blueprint))
    body = model.get_submodule("0.seed.body")
    assert isinstance(body, fx.GraphModule)


@pytest.mark.parametrize(
    "user_blueprint", [ModalBody, NoisyBody, LuckyBody, CountingBody], indirect=True
)
def test_a_users_blueprint_that_a_graph_would_change_stays_itself(user_blueprint: str) -> None:
    model = export_module(*grown_chain(user_blueprint))
    body = model.get_submodule("0.seed.body")
    assert isinstance(body, TraceableBody)
    assert isinstance(body.gate, fx.GraphModule)


def test_layers_of_esper_inside_a_users_model_become_graphs() -> None:
    torch.manual_seed(0)
    sample = torch.randn(4, 5, 6)
    places = [Target(path, layout=Layout.TOKENS) for path in ("norm", "attention")]
    host = SlottedModel(EsperInside(), places, sample, rules=RULES)
    grow(host, ["mlp", "norm"])
    model = export_module(host, sample)
    assert type(model) is EsperInside
    assert isinstance(model.norm, fx.GraphModule)
    assert torch.equal(copy.deepcopy(model)(sample), model(sample))


class KeepsSpec(nn.Module):
    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.spec = spec
        self.out = zeroed(nn.Linear(spec.channels, spec.channels))

    def forward(self, h: Tensor) -> Tensor:
        return self.out(h) if self.training else 1 * self.out(h)


def test_an_attribute_that_would_need_esper_is_named() -> None:
    blueprint("keeps_spec", "dense")(KeepsSpec)
    try:
        with pytest.raises(ExportError, match=r"seed\.body.*SlotSpec in 'spec'"):
            export_module(*grown_chain("keeps_spec"))
    finally:
        unregister_blueprint("keeps_spec", "dense")
