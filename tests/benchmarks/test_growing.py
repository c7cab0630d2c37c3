"""The benchmark of growing: a fair start from scratch, paired figures, and a run in seconds."""

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.tolaria.data.image_sets import FASHION_MNIST, idx_splits

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import growing

    return growing


def net() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11))


def grown_net(blueprint: str) -> nn.Module:
    """A network with a permanent seed, every number of which was trained."""
    tokens = torch.randint(11, (12, 5))
    run = esper.grow(
        net(),
        (tokens, tokens),
        (tokens, tokens),
        loss="cross_entropy",
        budget=None,
        epochs=9,
        slots=["1"],
        controller=f"fixed:slot=1,blueprint={blueprint},epoch=1",
    )
    assert [seed.blueprint for seed in run.report().grown] == [blueprint]
    plain = run.export()
    for parameter in plain.parameters():
        nn.init.constant_(parameter, 7.0)
    return plain


@pytest.mark.parametrize("blueprint", ["norm", "lora", "gate", "attention", "mlp"])
def test_a_network_from_scratch_keeps_nothing_of_what_was_trained(
    growing: ModuleType, blueprint: str
) -> None:
    plain, host = grown_net(blueprint), net()
    shapes = {name: tensor.shape for name, tensor in plain.state_dict().items()}
    growing.start_anew(plain, host)
    found = plain.state_dict()
    assert {name: tensor.shape for name, tensor in found.items()} == shapes
    for name, tensor in host.state_dict().items():
        assert torch.equal(found[name], tensor)
    seeds = {name: tensor for name, tensor in found.items() if ".seed." in name}
    assert seeds
    assert not any(bool((tensor == 7.0).any()) for tensor in seeds.values())
    assert all(bool(_starts_well(name, tensor)) for name, tensor in seeds.items())


def _starts_well(name: str, tensor: Tensor) -> Tensor:
    """Maps are random and within torch's bound; norms and gates start at one."""
    if tensor.dim() == 2:
        return (tensor.abs() <= tensor.shape[1] ** -0.5).all() & (tensor.std() > 0)
    return (tensor.abs() <= 1.0).all() & (name.endswith("bias") | (tensor == 1.0).all())


def test_ways_are_compared_on_the_same_seeds(growing: ModuleType) -> None:
    def outcome(test: float) -> object:
        return growing.Outcome(100, test, 50.0, 0.01, [], 1.0)

    # Seeds differ by far more than ways, which a comparison of the same seeds does not mind.
    found = [
        {"never": outcome(level), "default": outcome(level), "grown": outcome(level + 1.0)}
        | {"scratch": outcome(level - 2.0)}
        for level in (10.0, 50.0, 90.0)
    ]
    lines = growing.lines_of(growing.TASKS["mnist1d"], found)
    gaps = {line.way: line.difference for line in lines}
    assert gaps["never"] is None
    assert tuple(gaps["grown"]) == pytest.approx((1.0, 1.0, 1.0))
    assert tuple(gaps["scratch"]) == pytest.approx((-2.0, -2.0, -2.0))
    figures = lines[2].figures()
    assert figures["growing_mnist1d_grown_test"] == pytest.approx(51.0)
    assert figures["growing_mnist1d_grown_difference_lo"] == pytest.approx(1.0)


def test_every_controller_of_the_tasks_fits_its_host_within_the_budget(
    growing: ModuleType,
) -> None:
    inputs = {
        "mnist1d": torch.randn(6, 40),
        "fashion_mnist": torch.randn(6, 1, 28, 28),
        "stdlib": torch.randint(256, (6, 32)),
    }
    for name, task in growing.TASKS.items():
        budget = esper.Budget(growing.BUDGET, task.epochs)
        # A host that refuses its controller raises; what the budget has no room for is not offered.
        host = esper.wrap(task.build(), inputs[name], slots=list(task.slots), budget=budget)
        chosen = host.require_controller(task.controller)
        offered = {
            f"{place.path}/{blueprint}"
            for place in esper.inspect(task.build(), inputs[name], budget=budget).places
            for blueprint in place.options
        }
        assert set(chosen.config.places) <= offered


def test_a_quick_run_is_kept_and_not_trained_again(
    growing: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["growing.py", "--quick", "--tasks", "mnist1d", "--steps", "0"]
    words += ["--runs", str(tmp_path / "runs"), "--json", str(tmp_path / "figures.json")]
    words += ["--picture", str(tmp_path / "picture.png")]
    monkeypatch.setattr(sys, "argv", words)
    growing.main()
    first = (tmp_path / "figures.json").read_text()
    monkeypatch.setattr(growing, "compare", lambda *_: pytest.fail("trained again"))
    growing.main()
    assert (tmp_path / "figures.json").read_text() == first
    figures = json.loads(first)
    host, grown = (figures[f"growing_mnist1d_{way}_params"] for way in ("never", "grown"))
    assert host < grown <= 1.15 * host
    assert grown == figures["growing_mnist1d_scratch_params"]
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert "convpool at 0 (1/1)" in capsys.readouterr().out


def test_data_that_are_not_there_are_answered_with_the_command_that_gets_them(
    growing: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ESPER_DATA", raising=False)
    source = dataclasses.replace(FASHION_MNIST, packaged=tmp_path)
    lost = dataclasses.replace(growing.TASKS["fashion_mnist"], load=partial(idx_splits, source))
    monkeypatch.setitem(growing.TASKS, "fashion_mnist", lost)
    monkeypatch.setattr(sys, "argv", ["growing.py", "--quick", "--tasks", "fashion_mnist"])
    with pytest.raises(SystemExit, match=r"apt-get install .*dataset-fashion-mnist"):
        growing.main()
