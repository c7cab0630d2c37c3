"""Growing in a Hugging Face `Trainer`: one callback. Needs the extra `transformers`."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from esper.api.ranks import summed
from esper.integrations import attached
from esper.integrations.attached import GrowingCallback, IntegrationError, attach, first_batch
from esper.kasmina.watching import call
from esper.leyline.errors import install_hint

try:
    from transformers import TrainerCallback, TrainerState, TrainingArguments
except ImportError as error:
    raise IntegrationError(
        "transformers is not installed", fix=install_hint("transformers")
    ) from error

LOSS = "eval_loss"


class EsperCallback(GrowingCallback, TrainerCallback):  # type: ignore[misc]
    """Lets a model grow: `Trainer(model, args, ..., callbacks=[EsperCallback()])`.

    A tick follows every evaluation (`eval_strategy="epoch"`). `monitor` is one of its metrics: a
    loss, or a score as a fraction of 1 (`percent=True`: in percent). What seeds contribute is
    measured by the loss on the evaluation data without them; for any other metric pass `evaluate`,
    a function that scores a model in percent. All other settings are those of `esper.wrap`.

    What grew is in the model's state below `esper.`, so it is in checkpoints and in what
    `save_model` writes, and comes back with `resume_from_checkpoint`.
    """

    def __init__(self, monitor: str = LOSS, **settings: Any) -> None:
        super().__init__(monitor, **settings)
        self._model: nn.Module | None = None
        self._evaluated: list[str] = []  # names of metrics, since the last step
        self._forward: Any = None  # the hook that sees losses, while it trains

    # --- the trainer's events, in the order in which they come -----------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Before a checkpoint is loaded."""
        self._model = given["model"]
        if self._model is not None:
            self._growth = attach(self._model)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The optimiser is there and loaded."""
        model: nn.Module = given["model"]
        _require_possible(args, resumed=state.global_step > 0 and model is not self._model)
        self._model = model
        self._growth = attach(model)
        if self._growth.host is None:
            sample = self._settings.sample
            if sample is None:
                loader = given["train_dataloader"]
                sample = first_batch(getattr(loader, "base_dataloader", loader))
                sample = dict(sample) if isinstance(sample, Mapping) else sample
            self._begin(model, model, sample)
        optimizer, scheduler = given["optimizer"], given["lr_scheduler"]
        self._train(
            getattr(optimizer, "optimizer", optimizer),  # accelerate's holds the real one
            [getattr(scheduler, "scheduler", scheduler)],
            measured=self._settings.monitor == LOSS,
            ticks=_evaluations(args, state),
            resumed=state.global_step > 0,
        )
        self._forward = model.register_forward_hook(self._see_loss)

    def _see_loss(self, model: nn.Module, args: Any, output: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._saw_loss(_loss(output))

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Before a checkpoint is written; once for each of several sets of data."""
        metrics, monitor = given["metrics"], self._settings.monitor
        if self._forward is not None:
            self._evaluated += metrics
            if monitor in metrics:
                again = partial(evaluation_loss, given["model"], given["eval_dataloader"])
                self._tick(float(metrics[monitor]), again if monitor == LOSS else None)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        found, self._evaluated = self._evaluated, []
        monitor = self._settings.monitor
        if found and monitor not in found:
            raise IntegrationError(
                "What is monitored is not among the metrics of the evaluation",
                given=monitor,
                valid=", ".join(found),
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if not args.load_best_model_at_end:  # which is kept as it was evaluated
            self._end()
        self._forward.remove()
        self._forward = None


def _require_possible(args: TrainingArguments, *, resumed: bool) -> None:
    if args.eval_strategy == "no":
        raise IntegrationError(
            "A tick follows every evaluation, and there is none",
            given="eval_strategy='no'",
            fix="set eval_strategy='epoch' and give the trainer an eval_dataset",
        )
    if resumed:
        raise IntegrationError(
            "What grew was not loaded, because model or callback came after the checkpoint",
            given="add_callback or model_init",
            fix="give the trainer the model itself and callbacks=[EsperCallback(...)]",
        )
    if args.parallel_mode.value == "not_distributed" or args.fsdp or args.deepspeed:
        raise IntegrationError(
            "Nothing can grow where a model is copied to several devices or its parameters are "
            "sharded",
            given=args.parallel_mode.value,
            valid="one device, or one process for each with torchrun",
        )


def _evaluations(args: TrainingArguments, state: TrainerState) -> int | None:
    """How many there will be, and thus ticks."""
    if args.eval_strategy == "epoch":
        return int(state.num_train_epochs) or None
    wanted: float = state.max_steps / state.eval_steps
    return math.ceil(wanted)


def _loss(output: Any) -> Any:
    if isinstance(output, Mapping):
        return output.get("loss")
    first = output[0] if isinstance(output, tuple) and output else None
    return first if isinstance(first, Tensor) and first.dim() == 0 else None


@torch.no_grad()
def evaluation_loss(model: nn.Module, loader: Any) -> float:
    """Of the model as it is now: the mean over samples, as the trainer has it."""
    total, count = 0.0, 0
    for batch in loader:
        loss = _loss(call(model, attached.on_device(dict(batch), model)))
        size = next(len(each) for each in batch.values() if isinstance(each, Tensor) and each.dim())
        if not isinstance(loss, Tensor):
            raise IntegrationError(
                "The model returns no loss on the evaluation data",
                fix="pass evaluate=, a function that scores the model in percent",
            )
        total, count = total + float(loss.float().mean()) * size, count + size
    both = torch.tensor([total, float(count)], dtype=torch.float64)
    total, samples = summed(model, both).tolist()
    return float(total / samples)
