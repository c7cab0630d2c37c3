"""A Hugging Face trainer trains, a callback lets the model grow; tried with the real library."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from esper.integrations import grown
from esper.kasmina.gates import GateRules
from esper.leyline.errors import EsperError
from tests.api.tables import Script
from tests.integrations.processes import in_processes, require_same

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from esper.integrations.transformers import EsperCallback

_DRAW = torch.Generator().manual_seed(0)
TOKENS = torch.randint(3, 30, (48, 7), generator=_DRAW)
LABELS = (TOKENS[:, 1] > TOKENS[:, 2]).long()
SIZES = {"vocab_size": 30, "num_hidden_layers": 2, "num_attention_heads": 2}
ROWS = [{"input_ids": row, "labels": label} for row, label in zip(TOKENS, LABELS, strict=True)]
FIRST, SECOND = "bert.encoder.layer.0", "bert.encoder.layer.1"
DECISIONS = {
    1: ("plant", FIRST, "norm", "ramp"),
    2: ("plant", SECOND, "mlp", "ramp"),
    3: ("blend in", FIRST),
    6: ("keep", FIRST),
}


def bert() -> BertForSequenceClassification:
    """With dropout: the trainer brings random numbers back too."""
    torch.manual_seed(1)
    config = BertConfig(hidden_size=12, intermediate_size=16, max_position_embeddings=8, **SIZES)
    return BertForSequenceClassification(config)


def scripted(**settings: Any) -> EsperCallback:
    usual = {"slots": [FIRST, SECOND], "rules": GateRules.unmeasured()}
    return EsperCallback(**usual | {"controller": Script(DECISIONS)} | settings)


def arguments(folder: Path, epochs: int, **settings: Any) -> TrainingArguments:
    usual = {"eval_strategy": "epoch", "save_strategy": "no", "learning_rate": 5e-3}
    usual |= {"per_device_train_batch_size": 8, "report_to": "none", "disable_tqdm": True}
    return TrainingArguments(
        output_dir=str(folder), num_train_epochs=epochs, use_cpu=True, **usual | settings
    )


def trainer(
    folder: Path, epochs: int, *callbacks: TrainerCallback, model: Any = None, **settings: Any
) -> Trainer:
    return Trainer(
        bert() if model is None else model,
        arguments(folder, epochs, **settings),
        train_dataset=ROWS[:32],
        eval_dataset=ROWS[32:],
        callbacks=list(callbacks),
    )


class KilledAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_language_model_grows_and_is_saved_with_what_grew(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=30, n_embd=12, n_layer=2, n_head=2, n_positions=8)
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    decisions = {2: ("plant", "transformer.h.0", "mlp", "immediate")}
    decisions |= {4: ("keep", "transformer.h.0")}
    callback = EsperCallback(controller=Script(decisions), rules=GateRules.unmeasured())
    made = Trainer(
        GPT2LMHeadModel(config),
        arguments(tmp_path, 7, eval_strategy="steps", eval_steps=4),
        train_dataset=rows[:32],
        eval_dataset=rows[32:],
        callbacks=[callback],
    )
    made.train()
    ticks = callback.ticks
    assert [tick.epoch for tick in ticks] == list(range(1, 8)), "one after each evaluation"
    assert str(ticks[-1].decision) == "end"
    assert ticks[0].score == pytest.approx(36.788, abs=1e-3), "a loss, as a score"
    assert any(tick.decision.op == "GERMINATE" for tick in ticks)
    assert any(tick.contributions for tick in ticks), "measured by evaluating without the seed"
    made.save_model(str(tmp_path / "model"))
    state = load_file(tmp_path / "model" / "model.safetensors")
    plain = grown(GPT2LMHeadModel(config), state, {"input_ids": TOKENS[:4]}).export().eval()
    with torch.no_grad():
        assert torch.equal(plain(TOKENS).logits, made.model.eval()(TOKENS).logits)


WITHIN_EPOCHS = {"save_strategy": "steps", "save_steps": 3, "bf16": True}


@pytest.mark.parametrize("saved", [{"save_strategy": "epoch"}, WITHIN_EPOCHS])
def test_a_run_that_is_killed_goes_on_to_the_same_end(tmp_path: Path, saved: Any) -> None:
    how = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "warmup_steps": 3} | saved

    def killed() -> None:
        trainer(tmp_path / "it", 8, scripted(), KilledAt(10), **how).train()

    assert in_processes(killed) == [-signal.SIGKILL]
    callback, whole = scripted(), scripted()
    resumed = trainer(tmp_path / "it", 8, callback, **how)
    resumed.train(resume_from_checkpoint=True)
    straight = trainer(tmp_path / "whole", 8, whole, **how | {"save_strategy": "no"})
    straight.train()
    assert [tick.epoch for tick in callback.ticks] == [5, 6, 7, 8]
    assert callback.ticks == whole.ticks[4:]
    require_same(resumed.model.state_dict(), straight.model.state_dict())
    assert whole.host.seed_slots[FIRST].stage.name == "FOSSILIZED"
    rates = [group["lr"] for group in straight.optimizer.param_groups]
    assert rates == [group["lr"] for group in resumed.optimizer.param_groups]


def test_a_seed_has_what_the_models_own_parts_have(tmp_path: Path) -> None:
    """It is clipped and zeroed with the model; its gate follows the schedule, ten times faster."""
    norms: list[float] = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            found = [p.grad for p in given["model"].parameters() if p.grad is not None]
            norms.append(float(torch.nn.utils.get_total_norm(found)))
            groups = given["optimizer"].param_groups
            assert all(group["lr"] == pytest.approx(groups[0]["lr"]) for group in groups[1:-1])
            assert groups[-1]["lr"] == pytest.approx(10 * groups[0]["lr"])

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            assert all(p.grad is None for p in given["model"].parameters())

    callback = scripted()
    made = trainer(tmp_path, 4, callback, Look(), max_grad_norm=0.1)
    made.train()
    assert callback.host.added == 0, "what is not permanent is taken out at the end"
    assert max(norms) <= 0.1 * 1.001
    assert any(tick.added for tick in callback.ticks)


def test_the_best_model_comes_back_with_what_it_had_grown(tmp_path: Path) -> None:
    callback = scripted()
    settings = {"save_strategy": "epoch", "load_best_model_at_end": True, "learning_rate": 0.05}
    made = trainer(tmp_path, 5, callback, **settings)
    made.train()
    kept = load_file(Path(made.state.best_model_checkpoint) / "model.safetensors")
    found = made.model.state_dict()
    require_same(kept, found)


def test_a_second_training_lets_more_grow(tmp_path: Path) -> None:
    plants = {2: ("plant", FIRST, "norm", "ramp"), 3: ("plant", SECOND, "mlp", "ramp")}
    callback = scripted(controller=Script(plants))
    made = trainer(tmp_path, 2, callback)
    made.train()
    made.train()
    found = [str(tick.decision) for tick in callback.ticks]
    assert found[1:] == ["end", f"plant mlp at {SECOND} (ramp)", "end"]


def test_one_of_several_sets_of_data_is_monitored(tmp_path: Path) -> None:
    callback = scripted(monitor="eval_one_loss", controller="never", evaluate=accuracy)
    made = trainer(tmp_path, 2, callback)
    made.eval_dataset = {"one": ROWS[32:40], "two": ROWS[40:]}
    made.train()
    assert [tick.epoch for tick in callback.ticks] == [1, 2]


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ({}, {"eval_strategy": "no"}, r"eval_strategy='epoch'"),
        ({"monitor": "eval_f1", "controller": "plateau"}, {}, "eval_f1; valid: eval_loss"),
        ({"monitor": "eval_f1"}, {}, "no evaluate="),
    ],
)
def test_what_cannot_grow_is_refused_in_a_sentence(
    tmp_path: Path, settings: Any, arguments: Any, message: str
) -> None:
    made = trainer(tmp_path, 9, EsperCallback(**settings), **arguments)
    with pytest.raises(EsperError, match=message):
        made.train()


def test_what_grew_is_not_lost_where_the_model_is_made_late(tmp_path: Path) -> None:
    trainer(tmp_path, 2, scripted(), save_strategy="epoch").train()
    made = Trainer(
        args=arguments(tmp_path, 3),
        model_init=bert,
        train_dataset=ROWS[:32],
        eval_dataset=ROWS[32:],
        callbacks=[scripted()],
    )
    with pytest.raises(EsperError, match=r"model_init; give the trainer the model itself"):
        made.train(resume_from_checkpoint=True)


def accuracy(model: nn.Module) -> Tensor:
    return (model(input_ids=TOKENS[32:]).logits.argmax(1) == LABELS[32:]).double().mean() * 100


def test_a_metric_of_ones_own_is_measured_by_a_function(tmp_path: Path) -> None:
    callback = EsperCallback("eval_accuracy", evaluate=accuracy, controller="never")
    made = trainer(tmp_path, 2, callback)
    made.compute_metrics = lambda found: {
        "accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())
    }
    made.train()
    assert callback.ticks[-1].score == pytest.approx(float(accuracy(made.model)))
