"""Growing on a GPU: found by itself, in bf16, interrupted and gone on with, exported."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.api import load_run
from tests.api.tables import TRAIN, VAL, Script, mlp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LIVES = {
    1: ("plant", "2", "mlp", "ramp"),
    2: ("plant", "5", "norm", "gate"),
    4: ("blend in", "2"),
    5: ("prune", "5"),
}
EAGER = "heuristic:first=1,patience=0,probation=1,trial=2,margin=-100"  # keeps what it can
SETTINGS: dict[str, Any] = {
    "loss": "cross_entropy",
    "budget": esper.Budget("+500%", epochs=14),
    "slots": ["2", "5"],
    "lr": 0.01,
    "batch_size": 16,
    "device": "auto",
}
PRECISIONS = pytest.mark.parametrize("precision", ["full", "bf16"])


def grown(**options: Any) -> Any:
    return esper.grow(mlp(), TRAIN, VAL, **{"controller": Script(LIVES), **SETTINGS, **options})


def places(run: Any) -> set[str]:
    optimiser = run.host.optimizers[0].state.values() if run.host.optimizers else ()
    moments = [value for state in optimiser for name, value in state.items() if name != "step"]
    return {
        tensor.device.type for tensor in (*run.host.parameters(), *run.host.buffers(), *moments)
    }


@PRECISIONS
def test_a_run_finds_the_card_and_says_so(precision: str) -> None:
    run = grown(precision=precision, test=VAL)
    assert places(run) == {"cuda"}
    name = f"cuda:0 ({torch.cuda.get_device_name(0)})"
    assert run.settings.device == name
    assert f", on {name} in {precision} precision" in str(run.report())
    assert {(each["device"], each["precision"]) for each in run.history} == {(name, precision)}
    assert [seed.fate for seed in run.seeds] == ["switched off at the end", "pruned"]
    assert run.history[-1]["train_loss"] < run.history[0]["train_loss"]


@PRECISIONS
def test_what_comes_of_it_is_a_plain_module_on_the_card_and_off_it(precision: str) -> None:
    run = grown(precision=precision, controller=EAGER)
    plain = run.export().eval()
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    x = VAL[0].cuda()
    with torch.no_grad():
        there, host = plain(x), run.host.eval()(x)
        torch.testing.assert_close(there, host)
        torch.testing.assert_close(plain.cpu()(VAL[0]), there.cpu(), rtol=1e-2, atol=1e-3)


@PRECISIONS
def test_isolated_seeds_leave_no_trace_in_the_host(precision: str) -> None:
    isolated = {1: LIVES[1], 2: LIVES[2], 4: ("prune", "2"), 5: ("prune", "5")}
    run = grown(precision=precision, controller=Script(isolated))
    never = grown(precision=precision, controller="never")
    for name, tensor in never.host.model.state_dict().items():
        torch.testing.assert_close(run.host.model.state_dict()[name], tensor, msg=name)


@PRECISIONS
def test_a_run_goes_on_where_it_was(precision: str, tmp_path: Path) -> None:
    def copy(record: dict[str, Any]) -> None:
        if record["epoch"] in (3, 7):
            shutil.copytree(tmp_path / "run", tmp_path / str(record["epoch"]))

    whole = grown(precision=precision, out=tmp_path / "run", on_epoch=copy)
    for epoch in ("3", "7"):
        again = esper.resume(
            tmp_path / epoch, mlp(7), TRAIN, VAL, controller=Script(LIVES), device="auto"
        )
        assert places(again) == {"cuda"}
        assert again.settings == whole.settings
        decided = [[record["decision"] for record in run.history] for run in (whole, again)]
        assert decided[0] == decided[1]
        for one, other in zip(whole.history, again.history, strict=True):
            assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-2, abs=1e-3)
    finished = load_run(tmp_path / "run", mlp(8))  # on the CPU, to be looked at
    assert places(finished) == {"cpu"}
    assert finished.seeds == whole.seeds


def test_a_run_begun_on_the_cpu_goes_on_on_the_card(tmp_path: Path) -> None:
    def interrupt(record: dict[str, Any]) -> None:
        if record["epoch"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grown(device=None, out=tmp_path / "run", on_epoch=interrupt)
    run = esper.resume(tmp_path / "run", mlp(), TRAIN, VAL, controller=Script(LIVES), device="auto")
    assert run.finished
    assert places(run) == {"cuda"}
    assert {record["device"][:3] for record in run.history} == {"cpu", "cud"}


class Right:
    """A metric with a state, which has to be where the outputs are."""

    def to(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        self.right, self.seen = torch.zeros((), device=self.device), 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.right += (outputs.argmax(1) == targets).sum()
        self.seen += len(targets)

    def compute(self) -> torch.Tensor:
        return 100.0 * self.right / self.seen

    __call__ = update


def test_losses_and_metrics_are_moved_to_the_card() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0])
    run = grown(loss=nn.CrossEntropyLoss(weight=weights), metric=Right(), controller="never")
    x, y = (part.cuda() for part in VAL)
    with torch.no_grad():
        right = float((run.export().eval()(x).argmax(1) == y).double().mean())
    assert run.after["score"] == pytest.approx(100.0 * right, abs=1e-3)


@pytest.mark.parametrize("controller", ["heuristic:first=1,patience=0", "random", "race:epochs=3"])
def test_rules_decide_on_the_card(controller: str) -> None:
    assert grown(controller=controller, precision="bf16").finished


def test_a_label_out_of_range_is_told_before_the_card_fails() -> None:
    with pytest.raises(Exception, match="labels from 1 to 3; valid: 0 to 2"):
        esper.grow(mlp(), (TRAIN[0], TRAIN[1] + 1), VAL, **SETTINGS)
    assert float(torch.ones(3, device="cuda").sum()) == 3.0, "it still works"
