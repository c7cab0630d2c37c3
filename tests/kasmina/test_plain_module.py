"""The exported network: the committed one, exactly, without Esper and without harm to the host."""

import copy
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from esper.kasmina import (
    SlottedModel,
    export_module,
    export_program,
)
from esper.kasmina.watching import call
from esper.leyline import ExportError, SeedStage
from tests.kasmina import export_models as models
from tests.kasmina.grown_hosts import FAMILIES, HOSTS, RULES, grow, plant
from tests.kasmina.precisions import NARROW_LSTM

ROOT = Path(__file__).parents[2]


def tensors(output: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def assert_same(left: object, right: object) -> None:
    for one, other in zip(tensors(left), tensors(right), strict=True):
        assert torch.equal(one, other)


def seeded(module: nn.Module, sample: Any) -> object:
    torch.manual_seed(1)
    return call(module, sample)


def counterparts(host: SlottedModel, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter of the exported network beside the host's."""
    own = dict(host.model.named_parameters())
    exported = dict(model.named_parameters())
    for name in own:
        yield exported.pop(name), own[name]
    kept = host.lifecycle.at(SeedStage.FOSSILIZED)[0].tolist()
    seeds = [
        (f"seed{'' if place.part is None else f'_{place.part}'}.{name}", parameter)
        for place, slot, is_kept in zip(host.slot_places, host.slots, kept, strict=True)
        if is_kept
        for name, parameter in slot.seed.named_parameters()
    ]
    assert len(seeds) == len(exported)
    for name, parameter in seeds:
        # Several seeds have parameters of the same name; here every one has other values.
        (found,) = [
            key
            for key, value in exported.items()
            if key.endswith(name) and torch.equal(value, parameter)
        ]
        yield exported.pop(found), parameter


@cache
def exported(name: str) -> tuple[SlottedModel, nn.Module, Any]:
    """A host that had gradients, its export and a sample; the tests leave host and export alike."""
    host, sample = HOSTS[name].build()
    sum(out.square().sum() for out in tensors(seeded(host, sample))).backward()
    model = export_module(host, sample)
    assert all(p.grad is None for p in model.parameters())
    return host, model, sample


@pytest.mark.parametrize("name", HOSTS)
def test_the_export_gives_the_outputs_of_the_committed_network(name: str) -> None:
    host, model, sample = exported(name)
    for training in (True, False):
        host.train(training)
        model.train(training)
        with host.committed():
            expected = seeded(host, sample)
        assert_same(seeded(model, sample), expected)
    alive = tensors(seeded(host, sample))
    pairs = zip(alive, tensors(expected), strict=True)
    assert any(not torch.equal(one, other) for one, other in pairs)  # the living seed is not in it


@pytest.mark.parametrize("name", HOSTS)
def test_the_export_has_the_gradients_of_the_committed_network(name: str) -> None:
    host, model, sample = exported(name)
    for each in (host, model):
        each.train().zero_grad()
    with host.committed():
        sum(out.square().sum() for out in tensors(seeded(host, sample))).backward()
    sum(out.square().sum() for out in tensors(seeded(model, sample))).backward()
    for mine, theirs in counterparts(host, model):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("name", HOSTS)
def test_a_copy_of_the_export_is_whole(name: str) -> None:
    _, model, sample = exported(name)
    twin = copy.deepcopy(model)
    names = [key for key, _ in model.named_parameters()]
    assert sorted(key for key, _ in twin.named_parameters()) == sorted(names)
    expected = seeded(model.eval(), sample)
    assert_same(seeded(twin.eval(), sample), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(not out.any() for out in tensors(seeded(twin, sample)))  # none lives elsewhere
    assert_same(seeded(model, sample), expected)


WITHOUT_ESPER = """
import json, sys
from pathlib import Path

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "esper":
            raise ImportError("esper is not here")

sys.meta_path.insert(0, Blocker())
sys.path.insert(0, sys.argv[2])
import torch
from torch.utils._pytree import tree_leaves

torch.set_num_threads(1)  # as here: the bits depend on it
report = {}
for file in sorted(Path(sys.argv[1]).glob("*.pt")):
    saved = torch.load(file, weights_only=False)
    loaded = [saved["model"]]
    if (program := file.with_suffix(".pt2")).exists():
        loaded.append(torch.export.load(program).module())
    for model in loaded:
        given = tree_leaves(model(*saved["args"], **saved["kwargs"]))
        same = [
            torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            for a, b in zip(given, tree_leaves(saved["output"]), strict=True)
        ]
        report.setdefault(file.stem, []).append(all(same))
    report[file.stem].append(sorted(n for n, _ in saved["model"].named_parameters()))
try:
    import esper
except ImportError:
    print(json.dumps(report))
"""


def test_the_export_loads_and_runs_where_esper_cannot_be_imported(tmp_path: Path) -> None:
    names: dict[str, list[str]] = {}
    for name in HOSTS:
        host, model, sample = exported(name)
        model.eval()
        args = sample if isinstance(sample, tuple) else (sample,)
        args, kwargs = ((), sample) if isinstance(sample, dict) else (args, {})
        saved = {"model": model, "args": args, "kwargs": kwargs, "output": call(model, sample)}
        torch.save(saved, tmp_path / f"{name}.pt")
        names[name] = sorted(key for key, _ in model.named_parameters())
        if name == "lstm":
            export_program(host.eval(), sample, tmp_path / f"{name}.pt2")
    finished = subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT_ESPER, str(tmp_path), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    files = {name: 2 if name == "lstm" else 1 for name in HOSTS}
    assert report == {name: [True] * files[name] + [names[name]] for name in HOSTS}


def test_shared_modules_and_tied_weights_stay_one() -> None:
    tied = export_module(*HOSTS["tied weights"].build())
    assert tied.head.weight is tied.embed.weight
    twice = export_module(*HOSTS["called twice"].build())
    assert twice.first is twice.again


@pytest.mark.parametrize("name", ["conv2d", "dense", pytest.param("lstm", marks=NARROW_LSTM)])
def test_the_export_follows_autocast_as_the_host_does(name: str) -> None:
    host, sample = HOSTS[name].build()
    model = export_module(host.eval(), sample)
    with torch.autocast("cpu", torch.bfloat16), host.committed():
        assert_same(model(sample), host(sample))


def test_a_host_of_mixed_precision_keeps_it() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(6, 6), nn.Linear(6, 6).bfloat16()
            self.end = nn.Identity()  # where a seed of the model's first precision meets bfloat16

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.narrow(self.wide(x).bfloat16()))

    sample = torch.randn(4, 6)
    host = SlottedModel(Mixed(), ["narrow", "end", "wide"], sample, rules=RULES)
    model = export_module(grow(host, ["mlp", "norm", "mlp"]), sample)
    with host.committed():
        assert_same(model(sample), host(sample))
    assert model(sample).dtype == torch.bfloat16


def test_graphs_remember_nothing_of_the_classes_they_were_made_from() -> None:
    model = export_module(*HOSTS["transformer"].build())
    graphs = [module.graph for module in model.modules() if isinstance(module, fx.GraphModule)]
    assert graphs
    assert not any(node.meta for graph in graphs for node in graph.nodes)


def test_names_modes_and_frozen_parameters_are_the_hosts() -> None:
    host, sample = HOSTS["residual cnn"].build()
    host.model.stem.weight.requires_grad_(False)
    host.model.layer1.eval()
    model = export_module(host, sample)
    own = {name for name in host.state_dict() if name.startswith("model.")}
    assert {name.removeprefix("model.") for name in own} <= set(model.state_dict())
    assert all(mine.requires_grad == own.requires_grad for mine, own in counterparts(host, model))
    modes = {path: module.training for path, module in host.model.named_modules()}
    assert {path: model.get_submodule(path).training for path in modes} == modes
    for path, module in host.model.named_modules():
        assert type(model.get_submodule(path)) is type(module)


@pytest.mark.parametrize("name", ["residual cnn", "dense", "counting"])
def test_the_host_trains_on_as_if_nothing_had_been_exported(name: str) -> None:
    def trained(exports: int) -> tuple[dict[str, Tensor], object]:
        if name == "counting":
            sample = torch.linspace(-1, 1, 24).reshape(4, 6)
            host = SlottedModel(models.Counting(), ["body", "norm"], sample, rules=RULES)
            grow(host, ["mlp", "norm"])
        else:
            host, sample = HOSTS[name].build()
        optimizer = torch.optim.Adam(host.parameters(), 0.01)
        host.track(optimizer)
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        for _ in range(3):
            optimizer.zero_grad()
            seeded_free = host(sample)
            seeded_free.square().sum().backward()
            for _ in range(exports):
                export_module(host, sample)
            optimizer.step()
        drawn = (torch.rand(3).tolist(), random.random(), np.random.rand())
        return host.state_dict(), (drawn, getattr(host.model, "runs", None))

    torch.manual_seed(0)
    (plain, drawn), _ = trained(0), torch.manual_seed(0)
    exported, drawn_too = trained(1)
    assert drawn == drawn_too
    assert plain.keys() == exported.keys()
    assert all(torch.equal(plain[key], exported[key]) for key in plain)


def test_what_is_switched_off_is_not_exported() -> None:
    host, sample = HOSTS["containers"].build()
    host.eval()
    with host.without("0"):
        model = export_module(host, sample)
        with host.committed():
            assert_same(model(sample), host(sample))
    assert not any(name.startswith("0.seed") for name, _ in model.named_parameters())


def test_a_model_without_seeds_is_exported_too() -> None:
    host = SlottedModel(FAMILIES["dense"].model(), rules=RULES)
    sample = torch.randn(4, 12)
    model = export_module(host, sample)
    assert isinstance(model, fx.GraphModule)
    assert_same(model(sample), host(sample))


# --- refusals ---------------------------------------------------------------------------------


def test_a_module_that_depends_on_its_children_is_refused_with_the_reason() -> None:
    sample = torch.randn(4, 6)
    model = nn.Sequential(models.ChildCounter(), nn.Linear(6, 2))
    host = SlottedModel(model, ["0"], sample, rules=RULES)
    plant(host, "0", "mlp")
    host.fossilize("0")
    with pytest.raises(ExportError, match=r"fails where the host does not.*ValueError"):
        export_module(host, sample)


class Largest(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.max(x.unflatten(1, (2, 3)), 2)


def test_an_output_whose_part_cannot_be_exchanged_is_refused() -> None:
    sample = torch.randn(4, 6)
    head = nn.Linear(2, 2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.largest, self.head = Largest(), head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.largest(x).values)

    host = SlottedModel(Model(), ["largest@0"], sample, rules=RULES)
    plant(host, "largest@0", "mlp")
    host.fossilize("largest@0")
    with pytest.raises(ExportError, match=r"'largest@0'.*a max, which has no copy"):
        export_module(host, sample)


def test_a_hook_that_makes_a_difference_and_is_lost_is_noticed() -> None:
    host, sample = FAMILIES["dense"].build()
    host.model.register_forward_hook(lambda _m, _a, output: output + 0.25)
    with pytest.raises(ExportError, match=r"differs by up to 0\.25"):
        export_module(host, sample)


def test_a_sample_that_the_host_refuses_is_reported() -> None:
    host, _ = HOSTS["lstm"].build()
    with pytest.raises(ExportError, match="fails on the sample"):
        export_module(host, torch.randn(4, 7))


def test_a_batch_that_only_training_refuses_is_explained() -> None:
    sample = torch.randn(1, 6)
    host = SlottedModel(models.Counting().eval(), ["body"], sample, rules=RULES)
    export_module(host.eval(), sample)
    with pytest.raises(ExportError, match=r"in present mode.*call host\.eval\(\) before"):
        export_module(host.train(), sample)


def test_a_carrier_that_left_the_model_is_reported() -> None:
    host, sample = HOSTS["containers"].build()
    host.model[0] = nn.Linear(6, 6)
    with pytest.raises(ExportError, match="no longer in the model"):
        export_module(host, sample)
