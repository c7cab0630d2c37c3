"""One call: whatever the data and the task, a plain module comes out, within the budget."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset

import esper
from esper.api import load_run
from esper.leyline.errors import EsperError
from esper.leyline.stages import SeedStage
from tests.api.tables import CLASSES, FEATURES, INPUTS, TRAIN, VAL, Script, draw, mlp, require_same

BUDGET = esper.Budget("+120%", epochs=8)
EAGER = "heuristic:first=1,patience=0,probation=1,trial=2,margin=-100"  # keeps what it plants


def grown(**options: Any) -> Any:
    usual = {"loss": "cross_entropy", "budget": BUDGET, "controller": EAGER, "batch_size": 16}
    return esper.grow(mlp(), TRAIN, VAL, **{**usual, **options})


def test_a_run_has_a_history_a_report_and_an_export() -> None:
    run = grown(test=VAL, slots=["2", "5"])
    assert run.finished
    assert [record["epoch"] for record in run.history] == list(range(1, 9))
    assert run.history[-1]["decision"]["op"] == "END"
    report = run.report()
    assert report.within_budget
    assert report.grown
    assert report.added == sum(p.numel() for p in run.host.slots.parameters()) <= report.room
    text = str(report)
    assert "within the budget" in text
    assert "grown:" in text
    assert f"test: {run.after['test_score']:.2f}" in text
    plain = run.export().eval()
    score = 100.0 * float((plain(VAL[0]).argmax(1) == VAL[1]).double().mean())
    assert score == run.after["score"] == run.after["test_score"]
    size = sum(p.numel() for p in plain.parameters())
    assert size == report.host_params + report.added


def test_what_was_not_permanent_at_the_end_is_gone() -> None:
    lines = Script({1: ("plant", "2", "mlp", "immediate"), 2: ("plant", "5", "mlp", "ramp")})
    run = grown(controller=lines, slots=["2", "5"])
    assert run.history[6]["added"] > 0
    assert run.host.added == run.report().added == 0
    assert run.report().most_added == run.history[6]["added"]
    plain = run.export()
    assert torch.equal(plain.eval()(INPUTS), run.host.eval()(INPUTS))
    assert "nothing grew for good" in str(run.report())


def test_never_grown_is_training_as_ever() -> None:
    run = grown(controller="never", optimizer=torch.optim.SGD, lr=0.1)
    assert run.history[-1]["train_loss"] < run.history[0]["train_loss"]
    assert {record["decision"]["op"] for record in run.history} == {"WAIT", "END"}
    nothing = grown(budget=esper.Budget(0, epochs=8), optimizer=torch.optim.SGD, lr=0.1)
    require_same(run.host.model.state_dict(), nothing.host.model.state_dict())


def test_a_run_whose_seeds_were_pruned_before_blending_is_one_that_never_grew() -> None:
    lines = Script({1: ("plant", "2", "mlp", "ramp"), 2: ("plant", "5", "norm", "gate"),
                    4: ("prune", "2"), 6: ("prune", "5")})  # fmt: skip
    run = grown(controller=lines, slots=["2", "5"])
    never = grown(controller="never", slots=["2", "5"])
    require_same(never.host.model.state_dict(), run.host.model.state_dict())
    assert [r["train_loss"] for r in never.history] == [r["train_loss"] for r in run.history]
    assert never.after == run.after


def test_the_same_seed_gives_the_same_run_and_leaves_random_numbers_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = grown()
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert grown().history == first.history
    assert grown(seed=1).history != first.history


class Rows(Dataset[Any]):
    """A map-style data set whose transform draws at random."""

    def __len__(self) -> int:
        return len(TRAIN[0])

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return TRAIN[0][index] + 0.01 * torch.randn(FEATURES), int(TRAIN[1][index])


@pytest.mark.parametrize(
    "train",
    [
        TRAIN,
        [part.numpy() for part in TRAIN],
        TensorDataset(*TRAIN),
        Rows(),
        DataLoader(TensorDataset(*TRAIN), 16, shuffle=True),
        DataLoader(Rows(), 16, shuffle=True, generator=torch.Generator()),
        DataLoader(Rows(), 16, num_workers=0, drop_last=True),
    ],
    ids=["tensors", "arrays", "tensor data set", "data set", "loader", "generator", "in order"],
)
def test_data_come_in_many_forms_and_always_in_the_same_order(train: Any) -> None:
    def run() -> list[Any]:
        torch.manual_seed(torch.seed() % 1000)
        found = esper.grow(mlp(), train, VAL, loss="cross_entropy", budget=BUDGET, epochs=8,
                           controller="plateau", batch_size=16)  # fmt: skip
        return [record["train_loss"] for record in found.history]

    assert run() == run()


class Regressor(nn.Module):
    """Takes two named inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(FEATURES, 8), nn.Linear(FEATURES, 8)
        self.act = nn.ReLU()
        self.out = nn.Linear(8, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.out(self.act(self.left(left) + self.right(right)))[:, 0]  # type: ignore[no-any-return]


class Named(Dataset[Any]):
    def __init__(self, first: int, last: int) -> None:
        self.rows = INPUTS[first:last]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        row = self.rows[index]
        return {"left": row, "right": -row}, 1000.0 * row[0]


def test_regression_is_scored_by_its_loss_whatever_the_unit() -> None:
    run = esper.grow(Regressor(), Named(0, 64), Named(64, 96), loss=mse_loss, budget="+200%",
                     epochs=8, lr=0.5, controller=EAGER, batch_size=16)  # fmt: skip
    assert run.settings.metric == "loss"
    assert run.before["score"] == pytest.approx(36.79, abs=0.01)
    assert all(0.0 <= record["score"] <= 100.0 for record in run.history)
    assert run.after["score"] > run.before["score"]
    assert run.report().grown
    with torch.no_grad():
        again = run.export()(**run.sample)
    assert again.shape == (16,)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x).cumsum(1) / 4)  # type: ignore[no-any-return]


class Writer(nn.Module):
    """A tiny language model over [B, T] tokens."""

    def __init__(self, words: int = 7, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)  # type: ignore[no-any-return]


def test_a_language_model_is_scored_by_its_loss() -> None:
    text = torch.arange(400).view(40, 10) % 7
    run = esper.grow(Writer(), (text[:32, :-1], text[:32, 1:]), (text[32:, :-1], text[32:, 1:]),
                     loss="cross_entropy", budget="+200%", epochs=8, lr=0.02,
                     controller=EAGER, batch_size=8)  # fmt: skip
    assert run.host.catalogue.slots.names == ("layers.0", "layers.1", "layers.2")
    assert {spec.layout.value for spec in run.host.specs} == {"tokens"}
    assert run.settings.metric == "loss"
    assert run.after["score"] > run.before["score"]
    assert all(
        slot.stage in (SeedStage.FOSSILIZED, SeedStage.DORMANT, SeedStage.EMBARGOED)
        for slot in run.host.seed_slots.values()
    )


def test_a_metric_of_ones_own_is_averaged_over_samples() -> None:
    def third_right(outputs: Tensor, targets: Tensor) -> Tensor:
        return 100.0 * (outputs.topk(2).indices == targets[:, None]).any(1).double().mean()

    run = grown(metric=third_right, loss=cross_entropy, batch_size=13)
    plain = run.export().eval()
    assert run.after["score"] == pytest.approx(float(third_right(plain(VAL[0]), VAL[1])))


def test_a_scheduler_steps_once_per_epoch() -> None:
    made = []

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        made.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
        return made[0]

    run = grown(scheduler=schedule, lr=0.256)
    assert made[0].last_epoch == 8
    assert run.host.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.001)


def test_a_frozen_model_grows_and_does_not_change() -> None:
    model = mlp().requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    run = esper.grow(model, TRAIN, VAL, loss="cross_entropy", budget=BUDGET, controller=EAGER,
                     batch_size=16, slots=["2", "5"], lr=0.05)  # fmt: skip
    require_same(before, dict(run.host.model.named_parameters()))
    assert run.report().grown
    assert run.history[-1]["train_loss"] < run.history[0]["train_loss"]
    never = esper.grow(mlp().requires_grad_(False), TRAIN, VAL, loss="cross_entropy",
                       budget=BUDGET, controller="never")  # fmt: skip
    assert never.finished


def test_a_loss_that_leads_to_no_parameter_is_told() -> None:
    with pytest.raises(EsperError, match=r"does not depend on any parameter.*argmax, detach"):
        grown(loss=lambda outputs, targets: cross_entropy(outputs.detach(), targets))


def test_a_report_calls_a_score_a_score_and_a_contribution_no_gain() -> None:
    run = grown(slots=["2", "5"], metric="loss")
    text = str(run.report())
    assert f"score: 36.79 (loss {run.before['loss']:.4g}) before training" in text
    assert "contributes" not in text
    assert "accuracy: " in str(grown(controller="never").report())
    seed = run.report().grown[0]
    assert (
        replace(seed, contributions={1: 55.3}).missed
        == ", is missed by 55.30 points if it is left out"
    )
    assert replace(seed, contributions={1: -1.2}).missed == ", stands in the way by 1.20 points"
    assert replace(seed, contributions={}).missed == ""
    assert all(seed.missed in text for seed in run.report().grown)


def test_each_epoch_is_reported_as_it_ends() -> None:
    seen: list[Any] = []
    run = grown(on_epoch=seen.append)
    assert seen == run.history


def test_chance_and_classes_are_known_to_controllers() -> None:
    run = grown()
    assert run.host.memory.classes == CLASSES


def test_inputs_of_any_length_may_end_in_a_batch_of_one() -> None:
    x, y = draw(33, FEATURES), torch.randint(CLASSES, (33,))
    run = esper.grow(mlp(), (x, y), (x, y), loss="cross_entropy", budget="+100%", epochs=6,
                     controller="never", batch_size=16)  # fmt: skip
    assert run.finished


# --- every seed that lived -----------------------------------------------------------------------

LIVES = Script(
    {
        1: ("plant", "2", "mlp", "immediate"),
        2: ("plant", "5", "norm", "ramp"),
        4: ("prune", "5"),
        5: ("keep", "2"),
        9: ("plant", "5", "lowrank", "gate"),
    }
)


def test_seeds_that_did_not_stay_are_in_the_report(tmp_path: Path) -> None:
    unmeasured = {"budget": esper.Budget("+500%", epochs=11), "slots": ["2", "5"]}
    run = grown(controller=LIVES, out=tmp_path / "run", **unmeasured)
    kept, pruned, last = run.seeds
    assert (kept.slot, kept.blueprint, kept.planted, kept.fate) == ("2", "mlp", 1, "permanent")
    assert kept.ended == 5
    assert kept.params == run.host.added == run.report().added
    assert kept.contribution == run.history[-1]["contributions"]["2"]
    assert run.report().grown == (kept,)
    assert (pruned.planted, pruned.ended, pruned.fate) == (2, 4, "pruned")
    assert pruned.contribution is None, "it was never on"
    assert pruned.params + kept.params == run.history[2]["added"]
    assert (last.planted, last.ended, last.fate) == (9, 11, "switched off at the end")
    assert last.params + kept.params == run.history[9]["added"]
    text = str(run.report())
    assert (
        f"norm at 5: {pruned.params} parameters, planted after epoch 2, pruned after epoch 4"
        in text
    )
    assert "lowrank at 5: " in text
    assert "planted after epoch 9, switched off at the end after epoch 11" in text
    assert load_run(tmp_path / "run", mlp(3)).seeds == run.seeds


def test_a_seed_that_grows_still_has_no_end(tmp_path: Path) -> None:
    def interrupt(record: dict[str, Any]) -> None:
        if record["epoch"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grown(controller=LIVES, out=tmp_path / "run", slots=["2", "5"], on_epoch=interrupt)
    first, second = load_run(tmp_path / "run", mlp()).seeds
    assert [first.fate, second.fate] == ["growing", "growing"]
    assert first.ended is second.ended is None
    assert first.contribution is not None
    assert "when it was last left out" in str(first) or "stood in the way" in str(first)


# --- settings ------------------------------------------------------------------------------------


def test_weight_decay_is_the_optimisers_own_unless_it_is_given(tmp_path: Path) -> None:
    def decay(run: Any) -> set[float]:
        return {group["weight_decay"] for group in run.host.optimizers[0].param_groups}

    assert decay(grown(controller="never")) == {0.01}
    strong = grown(weight_decay=0.3, lr=0.05, controller=EAGER, out=tmp_path / "run")
    assert decay(strong) == {0.3}, "seeds decay too"
    assert strong.settings.weight_decay == 0.3
    weak = grown(weight_decay=0.0, lr=0.05, controller="never")
    weights = [run.host.model[0].weight.detach() for run in (strong, weak)]
    assert weights[0].norm() < weights[1].norm()
    assert load_run(tmp_path / "run", mlp()).settings == strong.settings


def test_a_run_says_where_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []
    run = grown(controller="never", device="auto", on_epoch=seen.append, metric="loss")
    said = f"on {run.settings.device} in full precision; a score is 100 · exp(−loss / "
    assert capsys.readouterr().err.startswith(said)
    there = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert str(next(run.host.parameters()).device) == there
    assert run.settings.device.startswith(there)
    assert {(record["device"], record["precision"]) for record in seen} == {
        (run.settings.device, "full")
    }
    assert f"8 of 8 epochs under 'never', on {run.settings.device} in full precision" in str(
        run.report()
    )
