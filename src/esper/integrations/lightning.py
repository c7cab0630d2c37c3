"""Growing in a Lightning `Trainer`: one callback. Needs the extra `lightning`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from esper.integrations.attached import GrowingCallback, IntegrationError, attach, first_batch
from esper.kasmina.probe import Sample
from esper.kasmina.watching import watch
from esper.leyline.errors import install_hint

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError as error:
    raise IntegrationError("Lightning is not installed", fix=install_hint("lightning")) from error


class EsperCallback(GrowingCallback, Callback):  # type: ignore[misc]
    """Lets a `LightningModule` grow: `Trainer(callbacks=[EsperCallback("val_loss")])`.

    `monitor` is what the module logs in validation: a loss, or a score as a fraction of 1
    (`percent=True`: in percent). A tick follows every validation. What seeds contribute is measured
    by validating again without them, or by `evaluate`, a function that scores a model in percent.

    `module` is the path of the part that may grow, as in "net"; by default it is the whole module,
    or its only part if it has no `forward`. Its inputs are taken from the first batch, unless
    `sample` is given. All other settings are those of `esper.wrap`.

    What grew is in the module's state below `esper.`, so it is in checkpoints and comes back from
    them.
    """

    def __init__(self, monitor: str = "val_loss", *, module: str | None = None, **settings: Any):
        super().__init__(monitor, **settings)
        self._module = module

    # --- Lightning's hooks, in the order in which they come ------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
            raise IntegrationError(
                "Nothing can grow where parameters are sharded",
                given=type(trainer.strategy).__name__,
                valid="one device, or strategy='ddp'",
            )
        growth = self._growth = attach(pl_module)  # before a checkpoint is loaded
        if stage == "fit":
            averages = (WeightAveraging, StochasticWeightAveraging)
            for found in (each for each in trainer.callbacks if isinstance(each, averages)):
                # Its copy of the model would never know a seed that comes later.
                raise IntegrationError(
                    "An average that is made before anything grew would lose what grows",
                    given=type(found).__name__,
                    fix="leave it out, and average with esper.ema(callback.host, decay)",
                )
            if growth.host is not None:  # it was trained before, by another optimiser
                growth.host.optimizers.clear()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The optimiser is there, and not yet loaded."""
        if self._growth.host is not None:
            for optimizer in trainer.optimizers:
                self._growth.host.leave(optimizer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The optimiser is there and loaded."""
        if len(trainer.optimizers) != 1:
            raise IntegrationError(
                "Seeds join one optimiser that trains all parameters",
                given=f"{len(trainer.optimizers)} optimisers",
                fix="give one optimiser parameter groups in configure_optimizers",
            )
        if not trainer.enable_validation:
            raise IntegrationError(
                "A tick follows every validation, and there is none",
                fix="give the trainer validation data and the module a validation_step",
            )
        if self._growth.host is None:
            self._begin_with(trainer, pl_module, None)
        self._train(
            trainer.optimizers[0],
            [config.scheduler for config in trainer.lr_scheduler_configs],
            measured=_only_loader(trainer) is not None,
            ticks=_validations(trainer),
            resumed=trainer.global_step > 0,
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._saw_loss(outputs.get("loss") if isinstance(outputs, Mapping) else outputs)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before a checkpoint is written."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        monitor = self._settings.monitor
        if monitor not in trainer.callback_metrics:
            raise IntegrationError(
                "What is monitored was not logged in validation",
                given=monitor,
                valid=", ".join(trainer.callback_metrics) or "nothing was logged",
                fix=f"call self.log({monitor!r}, ...) in validation_step, or monitor another",
            )
        loader = _only_loader(trainer)
        again = None
        if loader is not None:
            again = partial(validated_again, trainer, pl_module, loader, monitor)
        self._tick(float(trainer.callback_metrics[monitor]), again)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, *place: Any
    ) -> None:
        """A grown model that is validated, tested or predicts: put back what grew."""
        growth = self._growth = attach(pl_module)
        if growth.waiting and growth.host is None and trainer.state.fn != "fit":
            self._begin_with(trainer, pl_module, batch)
            growth.recover()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    # --- beginning -----------------------------------------------------------------------

    def _begin_with(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        part, sample = self._part(module), self._settings.sample
        if sample is None:
            if batch is None:
                batch = trainer.strategy.batch_to_device(first_batch(trainer.train_dataloader))
            if isinstance(batch, (tuple, list)):  # inputs and targets
                batch = batch[0] if len(batch) <= 2 else tuple(batch[:-1])
            sample = batch
            if part is not module and _runs(module):
                sample = _seen_by(part, module, sample)
        self._begin(module, part, sample)

    def _part(self, module: nn.Module) -> nn.Module:
        if self._module is not None:
            try:
                return module.get_submodule(self._module)
            except AttributeError as error:
                names = ", ".join(name for name, _ in module.named_children() if name != "esper")
                raise IntegrationError(
                    "The module has no such part", given=repr(self._module), valid=names
                ) from error
        if _runs(module):
            return module
        parts = [each for each in module.children() if next(each.parameters(), None) is not None]
        if len(parts) != 1:
            raise IntegrationError(
                "The module has no forward, so it is not known what should grow",
                given=type(module).__name__,
                fix="name the part that takes the inputs, EsperCallback(..., module='net')",
            )
        return parts[0]


def _only_loader(trainer: Trainer) -> DataLoader[Any] | None:
    """Of validation data, if there is one."""
    found = trainer.val_dataloaders
    if isinstance(found, (list, tuple)) and len(found) == 1:
        found = found[0]
    return found if isinstance(found, DataLoader) else None


def _validations(trainer: Trainer) -> int | None:
    """How many there will be, and thus ticks, where that is known."""
    epochs, every = trainer.max_epochs or -1, trainer.check_val_every_n_epoch
    if epochs < 0 or not every or trainer.val_check_interval != 1.0 or trainer.fast_dev_run:
        return None
    return int(epochs // every)


def _runs(module: nn.Module) -> bool:
    return bool(type(module).forward is not LightningModule.forward)


def _seen_by(part: nn.Module, module: nn.Module, sample: Sample) -> Sample:
    """What the part is given when the module runs on the sample."""
    for seen in watch(module, {}, sample, training=False).events:
        if seen.module is part:
            return seen.inputs or seen.named_inputs
    raise IntegrationError(
        "The part that should grow does not run in the module's forward",
        given=type(part).__name__,
        fix="pass sample=, what this part is given in training",
    )


# --- validating again ------------------------------------------------------------------------


def validated_again(
    trainer: Trainer, module: LightningModule, loader: DataLoader[Any], monitor: str
) -> float:
    """The monitored quantity of the module as it is now, by its own steps; nothing is logged."""
    seen: list[tuple[Any, int]] = []
    size = 1

    def note(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if name in (monitor, monitor.removesuffix("_epoch")):  # so is a mean called beside steps
            seen.append((value, kwargs.get("batch_size") or size))

    limit = trainer.num_val_batches[0]
    with _logging_to(module, note), torch.no_grad():
        module.on_validation_epoch_start()
        for index, batch in enumerate(loader):
            if index >= limit:
                break
            batch = trainer.strategy.batch_to_device(batch)
            size = next(
                (len(t) for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim()), 1
            )
            with trainer.precision_plugin.val_step_context():
                module.validation_step(batch, index)
        size = 1
        module.on_validation_epoch_end()
        if not seen:
            raise IntegrationError(
                "What is monitored is not logged by the module's own validation",
                given=monitor,
                fix="pass evaluate=, a function that scores the model in percent",
            )
        if hasattr(seen[-1][0], "compute"):  # a metric that has seen every batch
            return float(seen[-1][0].compute())
        weights = sum(weight for _, weight in seen)
        return sum(float(value) * weight for value, weight in seen) / weights


@contextmanager
def _logging_to(module: LightningModule, note: Any) -> Iterator[None]:
    """Inside, `self.log` goes there, and metrics begin anew with tensors and lists of their own."""
    for part in module.modules():
        if all(hasattr(part, name) for name in ("update", "compute", "reset")):
            for name, value in list(vars(part).items()):
                if isinstance(value, list):
                    setattr(part, name, list(value))
            part.reset()
    setattr(module, "log", note)  # noqa: B010
    try:
        yield
    finally:
        delattr(module, "log")
