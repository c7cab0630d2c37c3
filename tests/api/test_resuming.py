"""A run that was interrupted goes on bit for bit, from every stage of a seed's life."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import esper
from esper.api import load_run, read_report
from esper.archive import ArchiveError
from esper.leyline.errors import EsperError
from esper.leyline.stages import SeedStage
from tests import programs
from tests.api.tables import TRAIN, VAL, Script, mlp, require_same, states

LIVES = {
    1: ("plant", "2", "mlp", "ramp"),
    2: ("plant", "5", "norm", "gate"),
    3: ("blend in", "2"),
    4: ("blend in", "5"),
    7: ("prune", "5"),
    12: ("plant", "5", "lowrank", "immediate"),
}
EPOCHS = 14
SETTINGS: dict[str, Any] = {
    "loss": "cross_entropy",
    "budget": esper.Budget("+500%", epochs=EPOCHS),
    "slots": ["2", "5"],
    "lr": 0.01,
    "batch_size": 16,
}


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)


def stirred() -> torch.nn.Module:
    """A model with other weights: they must all come from the checkpoint."""
    return mlp(start=77)


def test_a_run_goes_on_from_every_epoch_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    stages: set[SeedStage] = set()

    def copy(record: dict[str, Any]) -> None:
        shutil.copytree(tmp_path / "run", tmp_path / str(record["epoch"]))

    run = esper.grow(mlp(), TRAIN, VAL, test=VAL, controller=Script(LIVES), scheduler=schedule,
                     out=tmp_path / "run", on_epoch=copy, **SETTINGS)  # fmt: skip
    for epoch in (1, 3, 5, 7, 8, 10, 11, 13):
        folder = tmp_path / str(epoch)
        stopped = load_run(folder, stirred())
        stages |= {slot.stage for slot in stopped.host.seed_slots.values()}
        assert not stopped.finished
        torch.manual_seed(epoch)
        again = esper.resume(folder, stirred(), TRAIN, VAL, test=VAL, controller=Script(LIVES),
                             scheduler=schedule)  # fmt: skip
        assert again.history == run.history
        assert again.after == run.after
        require_same(states(run.host), states(again.host))
    assert stages >= set(SeedStage) - {SeedStage.GERMINATED, SeedStage.FOSSILIZED}


@pytest.mark.parametrize("controller", ["heuristic:first=1,patience=0", "race:epochs=3", "random"])
def test_rules_by_name_are_remembered_with_all_they_know(tmp_path: Path, controller: str) -> None:
    def copy(record: dict[str, Any]) -> None:
        if record["epoch"] in (4, 9):
            shutil.copytree(tmp_path / "run", tmp_path / str(record["epoch"]))

    run = esper.grow(mlp(), TRAIN, VAL, controller=controller, out=tmp_path / "run",
                     on_epoch=copy, **SETTINGS)  # fmt: skip
    for epoch in (4, 9):
        again = esper.resume(tmp_path / str(epoch), stirred(), TRAIN, VAL)
        assert again.history == run.history
        require_same(states(run.host), states(again.host))


def test_a_permanent_seed_comes_back(tmp_path: Path) -> None:
    keeps = "heuristic:first=1,patience=0,probation=1,trial=2,margin=-100"
    run = esper.grow(mlp(), TRAIN, VAL, controller=keeps, out=tmp_path / "run", **SETTINGS)
    assert run.report().grown
    again = esper.resume(tmp_path / "run", stirred())  # finished: needs no data
    assert again.history == run.history
    assert str(again.report()) == str(run.report())
    x = VAL[0]
    assert torch.equal(again.export().eval()(x), run.export().eval()(x))


def test_run_of_earlier_package_version_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted = esper.grow(mlp(), TRAIN, VAL, **BRIEFLY)
    with monkeypatch.context() as patch:
        patch.setattr("esper.api.run_records.__version__", "0.1.0")
        folder = stopped(tmp_path / "run", mlp(), **BRIEFLY)
    assert read_report(folder).versions["esper"] == "0.1.0"
    resumed = esper.resume(folder, stirred(), TRAIN, VAL)
    assert resumed.history == uninterrupted.history
    assert read_report(folder).versions["esper"] == esper.__version__


def test_a_finished_run_comes_back_in_evaluation_mode(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = esper.grow(mlp(), TRAIN, VAL, out=folder, **BRIEFLY)
    wanted = run.export()(VAL[0])  # with dropout, if it were in training mode
    for again in (esper.resume(folder, stirred()), load_run(folder, stirred())):
        assert not any(module.training for module in again.host.modules())
        assert not again.export().training
        assert torch.equal(again.export()(VAL[0]), wanted)


class Forgetful(torch.nn.Module):
    """Keeps running means out of its state: one made anew in each pass, one of a changing size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = torch.nn.Linear(6, 8), torch.nn.ReLU(), mlp(3)[-1]
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.register_buffer("long", torch.zeros(1), persistent=False)
        self.register_buffer("late", None, persistent=False)
        self.register_buffer("spare", torch.zeros(1), persistent=False)
        self.register_buffer("early", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.first(x))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            self.long = torch.cat([self.long, h.detach().mean()[None]])
            self.late, self.early = self.long[-1:] * 0.5, None
        late = 0.0 if self.late is None else self.late
        return self.last(h - self.mean - self.long.mean() - late)  # type: ignore[no-any-return]


class Lacking(Forgetful):
    def __init__(self) -> None:
        super().__init__()
        del self.spare


def stopped(folder: Path, model: torch.nn.Module, **options: Any) -> Path:
    def interrupt(record: dict[str, Any]) -> None:
        if record["epoch"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        esper.grow(model, TRAIN, VAL, out=folder, on_epoch=interrupt, **options)
    return folder


BRIEFLY: dict[str, Any] = {
    "loss": "cross_entropy",
    "budget": esper.Budget("+500%", epochs=4),
    "controller": "never",
    "batch_size": 16,
}


def test_buffers_that_are_no_part_of_the_state_come_back(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = Forgetful()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    whole = esper.grow(model, TRAIN, VAL, **BRIEFLY)
    other = Forgetful()
    other.load_state_dict(weights)
    folder = stopped(tmp_path / "run", other, **BRIEFLY)
    assert load_run(folder, Forgetful()).host.model.early is None
    again = esper.resume(folder, Forgetful(), TRAIN, VAL)
    assert again.history == whole.history
    require_same(states(whole.host), states(again.host))
    require_same(dict(whole.host.named_buffers()), dict(again.host.named_buffers()))
    with pytest.raises(EsperError, match=r"of another model; given: it has no buffer model\.spare"):
        load_run(folder, Lacking())


def test_what_was_frozen_stays_frozen(tmp_path: Path) -> None:
    def half_frozen(start: int = 1) -> torch.nn.Module:
        model = mlp(start)
        model[0].requires_grad_(False)
        return model

    whole = esper.grow(half_frozen(), TRAIN, VAL, **BRIEFLY)
    folder = stopped(tmp_path / "run", half_frozen(), **BRIEFLY)
    again = esper.resume(folder, stirred(), TRAIN, VAL)  # where nothing was frozen by hand
    require_same(states(whole.host), states(again.host))
    assert torch.equal(again.host.model[0].weight, mlp()[0].weight)
    learning = [p.requires_grad for p in whole.host.parameters()]
    assert [p.requires_grad for p in again.host.parameters()] == learning
    folder = stopped(tmp_path / "free", mlp(), **BRIEFLY)
    again = esper.resume(folder, half_frozen(9), TRAIN, VAL)  # and the other way round
    assert all(p.requires_grad for p in again.host.parameters())


def test_the_loss_and_the_metric_are_those_of_the_run(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run", mlp(), **BRIEFLY)
    rest = folder, mlp(), TRAIN, VAL
    with pytest.raises(EsperError, match="another loss; given: a function; valid: 'cross_entropy'"):
        esper.resume(*rest, loss=torch.nn.functional.cross_entropy)
    with pytest.raises(EsperError, match="another loss; given: 'mse'"):
        esper.resume(*rest, loss="mse")
    with pytest.raises(EsperError, match="another metric; given: 'loss'; valid: 'accuracy'"):
        esper.resume(*rest, metric="loss")
    with pytest.raises(EsperError, match="has no scheduler"):
        esper.resume(*rest, scheduler=schedule)
    assert esper.resume(*rest, loss="cross_entropy", metric="auto").finished
    own = {**BRIEFLY, "loss": torch.nn.functional.cross_entropy}
    folder = stopped(tmp_path / "own", mlp(), **own)
    with pytest.raises(EsperError, match=r"another loss.*valid: a function"):
        esper.resume(folder, mlp(), TRAIN, VAL, loss="cross_entropy")
    assert esper.resume(folder, mlp(), TRAIN, VAL, loss=own["loss"]).finished


CHILD = """
import sys
import torch
torch.set_num_threads(1)
import esper
from tests.api.test_resuming import SETTINGS
from tests import programs
from tests.api.tables import TRAIN, VAL, mlp
esper.grow(mlp(), TRAIN, VAL, controller="random", out=sys.argv[1],
           on_epoch=lambda record: print(record["epoch"], flush=True), **SETTINGS)
"""


def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    with programs.start(CHILD, tmp_path / "run") as child:
        for line in child.stdout:
            if line.strip() == "6":
                child.send_signal(signal.SIGKILL)
                break
    assert child.returncode == -signal.SIGKILL
    again = esper.resume(tmp_path / "run", stirred(), TRAIN, VAL)
    whole = esper.grow(mlp(), TRAIN, VAL, controller="random", **SETTINGS)
    assert again.history == whole.history
    require_same(states(whole.host), states(again.host))


def test_the_origin_comes_back(tmp_path: Path) -> None:
    origin = {"model": "net.py:Net", "data": {"name": "digits", "sizes": [1, 2]}}
    esper.grow(mlp(), TRAIN, VAL, origin=origin, out=tmp_path / "run", **BRIEFLY)
    assert read_report(tmp_path / "run").origin == origin


def test_where_the_last_checkpoint_is_damaged_the_one_before_it_ends_as_the_run_would_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    esper.grow(mlp(), TRAIN, VAL, out=run, **BRIEFLY)
    whole = [file.name for file in (run / "checkpoint").glob("*.safetensors")]
    damage(run / "checkpoint")
    assert len(read_report(run).epochs) == 3
    assert "is damaged" in (said := capsys.readouterr().err)
    assert "later epochs than 3 are lost" in said
    esper.resume(run, mlp(), TRAIN, VAL)
    assert [file.name for file in (run / "checkpoint").glob("*.safetensors")] == whole
    for name in ("checkpoint", "checkpoint-before"):
        damage(run / name)
    with pytest.raises(ArchiveError, match="is damaged"):
        esper.resume(run, mlp())


def damage(archive: Path) -> None:
    (tensors,) = archive.glob("*.safetensors")
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)


def test_nothing_is_pickled(tmp_path: Path) -> None:
    esper.grow(mlp(), TRAIN, VAL, controller="random", out=tmp_path / "run", **SETTINGS)
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert {file.suffix for file in files if file.name != "lock"} == {
        ".json", ".safetensors", ".sqlite",
    }  # fmt: skip


def test_two_processes_cannot_train_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.archive.run_folders.LOCK_SECONDS", 0.05)

    def meddle(record: dict[str, Any]) -> None:
        if record["epoch"] == 2:
            with pytest.raises(EsperError, match="is being trained by another process"):
                esper.resume(tmp_path / "run", mlp(), TRAIN, VAL)

    esper.grow(mlp(), TRAIN, VAL, out=tmp_path / "run", on_epoch=meddle, **BRIEFLY)


def test_interrupting_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    def interrupt(record: dict[str, Any]) -> None:
        if record["epoch"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        esper.grow(mlp(), TRAIN, VAL, out=tmp_path / "run", on_epoch=interrupt, **BRIEFLY)
    with pytest.raises(EsperError, match="holds a run already"):
        esper.grow(mlp(), TRAIN, VAL, out=tmp_path / "run", **BRIEFLY)
    assert len(esper.resume(tmp_path / "run", mlp(), TRAIN, VAL).history) == 4
