"""Growing under autocast: settings are kept, isolation and planting stay exact."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import esper
from tests.api.tables import TRAIN, VAL, Script, mlp, require_same, states

LIVES = {
    1: ("plant", "2", "mlp", "ramp"),
    2: ("plant", "5", "norm", "gate"),
    4: ("blend in", "2"),
    5: ("prune", "5"),
}
SETTINGS: dict[str, Any] = {
    "loss": "cross_entropy",
    "slots": ["2", "5"],
    "batch_size": 16,
    "precision": "bf16",
}


SEEN: set[tuple[bool, bool, torch.dtype]] = set()  # not in the model: scoring undoes its changes


class Watched(nn.Module):
    """Notes the type that its linear layers compute in."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.body(x)
        SEEN.add((self.training, torch.is_grad_enabled(), outputs.dtype))
        return outputs


def run(lives: dict[int, Any], epochs: int = 8, **options: Any) -> Any:
    budget = esper.Budget("+500%", epochs)
    return esper.grow(mlp(), TRAIN, VAL, controller=Script(lives), budget=budget,
                      **{**SETTINGS, **options})  # fmt: skip


def test_training_and_scoring_run_in_it_and_weights_do_not() -> None:
    SEEN.clear()
    options = {**SETTINGS, "slots": ["body.2"]}
    grown = esper.grow(Watched(), TRAIN, VAL, budget=esper.Budget("+500%", 3), **options,
                       controller=Script({1: ("plant", "body.2", "mlp", "ramp")}))  # fmt: skip
    half = {(mode, learns) for mode, learns, dtype in SEEN if dtype is torch.bfloat16}
    assert half == {(True, True), (False, False)}
    assert {p.dtype for p in grown.host.parameters()} == {torch.float32}
    assert grown.export()(TRAIN[0]).dtype is torch.float32
    assert ", on cpu in bf16 precision" in str(grown.report())
    assert {record["precision"] for record in grown.history} == {"bf16"}


def test_metrics_get_what_they_know() -> None:
    def by_numpy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float(100.0 * (outputs.numpy().argmax(1) == targets.numpy()).mean())

    assert run({}, 2, metric=by_numpy).history[-1]["score"] == run({}, 2).history[-1]["score"]


def test_what_isolated_seeds_do_leaves_no_trace_in_the_host() -> None:
    isolated = {1: LIVES[1], 2: LIVES[2], 4: ("prune", "2"), 5: ("prune", "5")}
    grown, never = run(isolated), run({})
    require_same(never.host.model.state_dict(), grown.host.model.state_dict())
    assert [r["train_loss"] for r in grown.history] == [r["train_loss"] for r in never.history]
    assert grown.after == never.after
    full = run({}, precision="full")
    assert full.history[0]["train_loss"] != never.history[0]["train_loss"]
    assert full.history[0]["train_loss"] == pytest.approx(never.history[0]["train_loss"], rel=0.1)


def test_a_planted_seed_that_is_off_changes_no_bit_and_learns() -> None:
    host = esper.wrap(mlp(), TRAIN[0][:8], slots=["2"], isolation="dual_pass")
    optimizer = host.optimizer(torch.optim.SGD, lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        before = host.eval()(VAL[0])
        host.germinate("2", "mlp")
        assert torch.equal(host(VAL[0]), before)
    seed = host.slots[0].seed
    weights = [p.detach().clone() for p in seed.parameters()]

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.cross_entropy(host(TRAIN[0]), TRAIN[1])

    host.train()
    for _ in range(2):
        optimizer.zero_grad()
        host.seed_step(loss)
        assert all(p.grad is None or not p.grad.any() for p in host.model.parameters())
        optimizer.step()
    assert any(not torch.equal(*pair) for pair in zip(weights, seed.parameters(), strict=True))


def test_a_run_in_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def copy(record: dict[str, Any]) -> None:
        if record["epoch"] == 3:
            shutil.copytree(tmp_path / "run", tmp_path / "copy")

    whole = run(LIVES, out=tmp_path / "run", on_epoch=copy)
    again = esper.resume(tmp_path / "copy", mlp(7), TRAIN, VAL, controller=Script(LIVES))
    assert again.settings == whole.settings
    assert again.history == whole.history
    require_same(states(whole.host), states(again.host))
