"""Lightning trains, a callback lets the module grow; tried with the real library."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import esper
from esper.integrations import grown
from esper.integrations.lightning import EsperCallback, validated_again
from esper.kasmina.gates import GateRules
from esper.leyline.errors import EsperError
from tests.api.tables import Script
from tests.integrations.processes import in_processes, require_same

_DRAW = torch.Generator().manual_seed(0)
X = torch.randn(160, 20, generator=_DRAW)
Y = (X[:, 0] * X[:, 1] > 0).long()
SHOWN = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU())
            self.head = nn.Linear(12, 2)
        self.accuracy = MulticlassAccuracy(2, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log_dict({"val_loss": cross_entropy(logits, batch[1]), "val_acc": self.accuracy})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
        return [optimizer], [schedule]


class KilledIn(Callback):
    """The process is killed in the middle of this epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.current_epoch == self.epoch:
            os.kill(os.getpid(), signal.SIGKILL)


class FailingIn(KilledIn):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.current_epoch == self.epoch:
            raise MemoryError


def data(size: int = 32) -> tuple[DataLoader[Any], DataLoader[Any]]:
    train, held_out = TensorDataset(X[:96], Y[:96]), TensorDataset(X[96:], Y[96:])
    return DataLoader(train, size), DataLoader(held_out, 24)


def scripted(**settings: Any) -> EsperCallback:
    """Plants one seed with a gate and one without, and keeps the first."""
    decisions = {
        1: ("plant", "net.1", "norm", "ramp"),
        2: ("plant", "net.3", "mlp", "ramp"),
        3: ("blend in", "net.1"),
        7: ("keep", "net.1"),
    }
    usual = {"slots": ["net.1", "net.3"], "rules": GateRules.unmeasured()}
    return EsperCallback(
        **{"monitor": "val_acc", "controller": Script(decisions)} | usual | settings
    )


def fit(
    folder: Path, callback: Callback, epochs: int, *others: Callback, path: Any = None,
    module: Lit | None = None, **how: Any,
) -> Lit:  # fmt: skip
    module = Lit() if module is None else module
    callbacks = [callback, *others]
    keeps = any(isinstance(each, ModelCheckpoint) for each in others)
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=folder,
                      enable_checkpointing=keeps, callbacks=callbacks, **SHOWN, **how)  # fmt: skip
    trainer.fit(module, *data(), ckpt_path=path)
    return module


def test_one_line_lets_a_module_grow(tmp_path: Path) -> None:
    callback = EsperCallback("val_acc")
    module = fit(tmp_path, callback, 12)
    ticks = callback.ticks
    assert [tick.epoch for tick in ticks] == list(range(1, 13))
    assert str(ticks[-1].decision) == "end", "the trainer's epochs are the budget's"
    assert any(tick.decision.op == "GERMINATE" for tick in ticks)
    assert any(tick.contributions for tick in ticks), "measured by validating without the seed"
    plain = callback.host.export()
    assert "esper" not in dict(plain.named_children())
    assert torch.equal(plain(X), module(X))


def test_a_seed_has_what_the_modules_own_parts_have(tmp_path: Path) -> None:
    """It is trained, scheduled, clipped and zeroed; its gate learns ten times faster."""
    callback = scripted()
    norms: list[float] = []

    class Look(Callback):
        def on_before_zero_grad(self, trainer: Trainer, pl_module: Lit, optimizer: Any) -> None:
            found = [p.grad for p in pl_module.parameters() if p.grad is not None]
            if found:
                norms.append(float(torch.nn.utils.get_total_norm(found)))

        def on_train_end(self, trainer: Trainer, pl_module: Lit) -> None:
            first, gates = trainer.optimizers[0].param_groups
            assert len(gates["params"]) == 1
            assert gates["lr"] == pytest.approx(10 * first["lr"])
            assert first["lr"] == pytest.approx(1e-2 * 0.9**8)
            held = {id(p) for group in (first, gates) for p in group["params"]}
            assert held == {id(p) for p in pl_module.parameters()}

    module = fit(tmp_path, callback, 8, Look(), gradient_clip_val=0.05, accumulate_grad_batches=2)
    assert callback.host.seed_slots["net.1"].stage.name == "FOSSILIZED"
    seed = callback.host.slots[0].seed
    assert all(bool((p != q).any()) for p, q in zip(seed.parameters(), _newborn(), strict=True))
    assert max(norms) <= 0.05 * 1.001
    assert (
        sum(p.numel() for p in module.parameters())
        == sum(p.numel() for p in Lit().parameters()) + callback.host.added
    )


def _newborn() -> list[Tensor]:
    host = esper.wrap(Lit().net, X[:4], slots=["1"])
    host.germinate("1", "norm")
    return list(host.slots.parameters())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_that_is_killed_goes_on_to_the_same_end(tmp_path: Path, precision: str) -> None:
    how = {"precision": precision, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}

    def killed() -> None:
        keeping = ModelCheckpoint(tmp_path / "kept", save_last=True)
        fit(tmp_path, scripted(), 9, keeping, KilledIn(5), **how)

    assert in_processes(killed) == [-signal.SIGKILL]
    callback, whole = scripted(), scripted()
    resumed = fit(tmp_path, callback, 9, path=tmp_path / "kept" / "last.ckpt", **how)
    straight = fit(tmp_path, whole, 9, **how)
    assert [tick.epoch for tick in callback.ticks] == [6, 7, 8, 9]
    assert callback.ticks == whole.ticks[5:]
    require_same(resumed.state_dict(), straight.state_dict())


def test_a_module_that_goes_on_by_itself_ends_the_same(tmp_path: Path) -> None:
    """The same module, which has grown already, is resumed by another trainer."""
    failed, whole, module = scripted(), scripted(), Lit()
    keeping = ModelCheckpoint(tmp_path, save_last=True)
    with pytest.raises(MemoryError):
        fit(tmp_path, failed, 9, keeping, FailingIn(5), module=module)
    fit(tmp_path, failed, 9, module=module, path=tmp_path / "last.ckpt")
    straight = fit(tmp_path, whole, 9)
    assert failed.ticks[-1] == whole.ticks[-1]
    require_same(module.state_dict(), straight.state_dict())


def test_a_longer_training_and_a_second_one_let_more_grow(tmp_path: Path) -> None:
    def twice() -> EsperCallback:
        plants = {2: ("plant", "net.1", "norm", "ramp"), 5: ("plant", "net.3", "mlp", "ramp")}
        return scripted(controller=Script(plants))

    callback, later = twice(), twice()
    module = fit(tmp_path, callback, 4, ModelCheckpoint(tmp_path, save_last=True))
    fit(tmp_path, later, 8, path=tmp_path / "last.ckpt")
    assert [str(tick.decision) for tick in later.ticks][::3] == ["plant mlp at net.3 (ramp)", "end"]
    fit(tmp_path, callback, 4, module=module)
    assert [str(tick.decision) for tick in callback.ticks[4:]][::3] == [
        "plant mlp at net.3 (ramp)",
        "end",
    ]


def test_a_checkpoint_shows_what_grew_where_it_would_be_lost(tmp_path: Path) -> None:
    callback = scripted()
    module = fit(tmp_path, callback, 9, ModelCheckpoint(tmp_path, filename="it"))
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*esper\."):
        Lit.load_from_checkpoint(tmp_path / "it.ckpt")
    trainer = Trainer(accelerator="cpu", callbacks=[scripted()], **SHOWN)
    answers = trainer.predict(Lit(), DataLoader(X, 40), ckpt_path=tmp_path / "it.ckpt")
    assert torch.equal(torch.cat(answers), module(X))
    state = torch.load(tmp_path / "it.ckpt", weights_only=True)["state_dict"]
    again = grown(Lit(), state, X[:8])
    assert torch.equal(again.export()(X), callback.host.export()(X))
    other = scripted(slots=["net.3"], controller="never")
    with pytest.raises(EsperError, match=r"cannot be put back.*slots"):
        fit(tmp_path, other, 10, path=tmp_path / "it.ckpt")


def test_an_average_grows_along(tmp_path: Path) -> None:
    callback = scripted()

    class Average(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Lit) -> None:
            self.average = esper.ema(callback.host, decay=0.5)

        def on_train_batch_end(self, *args: Any) -> None:
            self.average.update()

    averaging = Average()
    module = fit(tmp_path, callback, 9, averaging)
    found = averaging.average.export().state_dict()
    own = callback.host.export().state_dict()
    assert found.keys() == own.keys()
    assert any(".seed." in name for name in found)
    assert not any(torch.equal(found[name], own[name]) for name in found if "weight" in name)
    assert torch.equal(callback.host.export()(X), module(X)), "which has its own weights"


def test_metrics_are_as_if_nothing_had_been_validated_again(tmp_path: Path) -> None:
    module, seen = Lit(), []

    class Look(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: Lit) -> None:
            logged = float(trainer.callback_metrics["val_acc"])
            before = pl_module.accuracy.tp.clone()
            with torch.inference_mode(False):
                host = callback._growth.host
            if host is not None:
                from esper.api.ticking import measuring

                with measuring(host):
                    loss = validated_again(trainer, pl_module, trainer.val_dataloaders, "val_loss")
                    found = validated_again(trainer, pl_module, trainer.val_dataloaders, "val_acc")
                    mean = validated_again(
                        trainer, pl_module, trainer.val_dataloaders, "val_loss_epoch"
                    )
                assert mean == loss
                assert found == pytest.approx(logged)
                assert loss == pytest.approx(float(trainer.callback_metrics["val_loss"]))
                assert torch.equal(pl_module.accuracy.tp, before)
                seen.append(found)

    callback = scripted(controller="never")
    trainer = Trainer(max_epochs=2, accelerator="cpu", callbacks=[Look(), callback],
                      enable_checkpointing=False, **SHOWN)  # fmt: skip
    trainer.fit(module, *data())
    assert len(seen) == 2


class TwoOptimizers(Lit):
    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net, self.head)]


class Whole(Lit):
    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_acc", 100.0)


class Negative(Lit):
    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_nll", cross_entropy(self(batch[0]), batch[1]) - 9)


class Unvalidated(Lit):
    validation_step = LightningModule.validation_step


class Formless(Lit):
    forward = LightningModule.forward  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("module", "settings", "others", "message"),
    [
        (TwoOptimizers, {}, [], "2 optimisers; give one optimiser parameter groups"),
        (Lit, {}, [EMAWeightAveraging()], r"would lose what grows.*esper\.ema"),
        (Lit, {"monitor": "val_f1"}, [], r"val_f1; valid: .*val_loss.*self\.log\('val_f1'"),
        (Lit, {"module": "backbone"}, [], "no such part; given: 'backbone'; valid: net, head"),
        (Formless, {}, [], r"no forward.*module='net'"),
        (Unvalidated, {"controller": "plateau"}, [], "every validation, and there is none; give"),
        (Negative, {"monitor": "val_nll"}, [], r"never negative.*loss -[\d.]*,.*evaluate="),
        (Whole, {"controller": "plateau"}, [], "val_acc is more than a whole; given: 100; say per"),
    ],
)
def test_what_cannot_grow_is_refused_in_a_sentence(
    tmp_path: Path, module: type[Lit], settings: Any, others: list[Callback], message: str
) -> None:
    callback = EsperCallback(**{"monitor": "val_acc"} | settings)
    trainer = Trainer(max_epochs=9, accelerator="cpu", callbacks=[callback, *others],
                      num_sanity_val_steps=0, enable_checkpointing=False, **SHOWN)  # fmt: skip
    with pytest.raises(EsperError, match=message):
        trainer.fit(module(), *data())


def test_what_is_no_score_can_be_monitored_where_a_function_scores(tmp_path: Path) -> None:
    callback = scripted(monitor="val_nll", evaluate=lambda model: 60.0)
    fit(tmp_path, callback, 2, module=Negative())
    assert [tick.score for tick in callback.ticks] == [60.0, 60.0]


def test_a_named_part_is_seen_as_the_module_runs_it(tmp_path: Path) -> None:
    callback = EsperCallback("val_loss", module="head", slots=["0"], controller="never")

    class Flat(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.net.append(nn.BatchNorm1d(12))
            self.head = nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 2))

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Flat) -> None:
            assert int(pl_module.net[-1].num_batches_tracked) == 0, "left as it was"

    trainer = Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback, Look()],
                      enable_checkpointing=False, **SHOWN)  # fmt: skip
    train, held_out = data()
    trainer.fit(Flat(), train, [held_out])
    assert callback.host.sample[0].shape == (32, 12)
    assert callback.ticks[0].score == pytest.approx(36.788, abs=1e-3), "a loss, as a score"
