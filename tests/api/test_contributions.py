"""Contributions of permanent seeds: paired over samples, measured at the end, stored."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torchmetrics.classification import MulticlassAccuracy

import esper
from esper.api import GrownRun, load_run, scoring
from esper.api.contributions import paired_difference
from esper.api.scoring import Scoring
from esper.show.growth_facts import Contribution
from tests.api.tables import CLASSES, FEATURES, INPUTS, LABELS, TRAIN, VAL, mlp, remove_notes

KEEPS_EVERYTHING = "heuristic:first=1,patience=0,probation=1,trial=2,margin=-100"
BATCHES = [(INPUTS[:40], LABELS[:40]), (INPUTS[40:60], LABELS[40:60]), (INPUTS[60:], LABELS[60:])]


def grown(**options: Any) -> GrownRun:
    usual: dict[str, Any] = {
        "loss": "cross_entropy",
        "budget": esper.Budget("+120%", epochs=8),
        "controller": KEEPS_EVERYTHING,
        "slots": ["2", "5"],
        "batch_size": 16,
        "quiet": True,
    }
    return esper.grow(mlp(), TRAIN, VAL, **usual | options)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> GrownRun:
    return grown(out=tmp_path_factory.mktemp("runs") / "run")


def accuracy_of_samples(model: nn.Module) -> Tensor:
    return 100.0 * (model(VAL[0]).argmax(1) == VAL[1]).double()


def test_contribution_is_paired_difference_over_validation_samples(run: GrownRun) -> None:
    assert run.contributions.keys() == {seed.slot for seed in run.report().grown}
    assert run.contributions
    with torch.no_grad():
        for slot, contribution in run.contributions.items():
            scores = accuracy_of_samples(run.host)
            with run.host.without(slot):
                differences = scores - accuracy_of_samples(run.host)
            standard_error = float(differences.std()) / math.sqrt(len(differences))
            assert contribution.value == pytest.approx(float(differences.mean()))
            assert contribution.standard_error == pytest.approx(standard_error)


def test_measuring_contributions_does_not_change_the_network(
    run: GrownRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.api.grow_loop.measure_contributions", lambda *_: {})
    unmeasured = grown()
    assert unmeasured.after == run.after
    assert torch.equal(unmeasured.export()(VAL[0]), run.export()(VAL[0]))


def test_contributions_are_stored_with_the_run(run: GrownRun) -> None:
    assert run.folder is not None
    assert load_run(run.folder.path, mlp()).contributions == run.contributions


def test_run_of_an_older_version_loads_without_contributions(run: GrownRun, tmp_path: Path) -> None:
    assert run.folder is not None
    shutil.copytree(run.folder.path, tmp_path / "old")
    remove_notes(tmp_path / "old", "contributions")
    loaded = load_run(tmp_path / "old", mlp())
    assert loaded.finished
    assert loaded.contributions == {}
    assert loaded.report().grown == run.report().grown


def test_contribution_to_a_loss_is_in_units_of_the_loss() -> None:
    torch.manual_seed(0)
    targets = INPUTS[:, :1] * INPUTS[:, 1:2]
    data = INPUTS, targets
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1))
    run = esper.grow(
        net, data, data, loss="mse", budget="+120%", epochs=8, controller=KEEPS_EVERYTHING,
        slots=["1"], lr=1e-2, quiet=True,
    )  # fmt: skip
    contribution = run.contributions["1"]
    with torch.no_grad():
        losses = (run.host(INPUTS) - targets).square()[:, 0]
        with run.host.without("1"):
            differences = (run.host(INPUTS) - targets).square()[:, 0] - losses
    assert contribution.value == pytest.approx(float(differences.mean()), rel=1e-4)
    standard_error = float(differences.std()) / math.sqrt(len(differences))
    assert contribution.standard_error == pytest.approx(standard_error, rel=1e-4)


def test_metric_of_all_data_has_no_standard_error() -> None:
    run = grown(metric=MulticlassAccuracy(CLASSES, average="micro"))
    assert run.contributions
    for contribution in run.contributions.values():
        assert contribution.standard_error is None
        assert contribution.is_measurable == (contribution.value != 0.0)


def test_weights_of_samples_equal_repeated_samples_in_the_mean() -> None:
    scores, without = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0])
    weighted = paired_difference(scores, without, torch.tensor([1.0, 3.0]))
    assert weighted.value == pytest.approx(2.5)
    # Linearised: sqrt(n / (n - 1) * sum((share * (difference - mean)) ** 2)).
    assert weighted.standard_error == pytest.approx(math.sqrt(2 * 2 * (0.75 * 0.5) ** 2))


def test_one_sample_has_no_standard_error() -> None:
    ones = torch.ones(1)
    assert paired_difference(ones, 0 * ones, ones) == Contribution(value=1.0, standard_error=None)


def test_contribution_below_two_standard_errors_is_not_measurable() -> None:
    assert Contribution(value=-2.1, standard_error=1.0).is_measurable
    assert not Contribution(value=1.9, standard_error=1.0).is_measurable
    assert not Contribution(value=0.0, standard_error=0.0).is_measurable


# --- scores of samples ------------------------------------------------------------------------


def settled(loss: Any, metric: Any, model: nn.Module, batch: tuple[Any, Any]) -> Scoring:
    return Scoring.of(loss, metric).settled(model, batch)


def class_share(outputs: Tensor, targets: Tensor) -> float:
    return 100.0 * float((outputs.argmax(1) == targets).double().mean())


@pytest.mark.parametrize(
    ("loss", "metric", "units"),
    [
        ("cross_entropy", "accuracy", len(INPUTS)),
        ("cross_entropy", "loss", len(INPUTS)),
        (cross_entropy, "loss", len(INPUTS)),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 2.0])), "loss", len(BATCHES)),
        (lambda outputs, targets: cross_entropy(outputs, targets), "loss", len(BATCHES)),
        ("cross_entropy", class_share, len(BATCHES)),
    ],
)
def test_weighted_mean_of_sample_scores_is_the_score(loss: Any, metric: Any, units: int) -> None:
    model = mlp().eval()
    rules = settled(loss, metric, model, BATCHES[0])
    sample_scores, weights = rules.sample_scores(model, BATCHES)
    assert len(sample_scores) == len(weights) == units
    mean = float((sample_scores * weights).sum() / weights.sum())
    scores = rules.scores(model, BATCHES)
    assert mean == pytest.approx(-scores.loss if metric == "loss" else scores.score, rel=1e-5)


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_labels_that_do_not_count_have_no_weight(metric: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, CLASSES)  # a class for each of seven positions
    inputs, labels = torch.randn(10, 7, 4), torch.randint(CLASSES, (10, 7))
    labels[:3, 2:] = scoring.IGNORED
    labels[9] = scoring.IGNORED
    rules = settled("cross_entropy", metric, model, (inputs, labels))
    batches = [(inputs[:8], labels[:8]), (inputs[8:], labels[8:])]
    sample_scores, weights = rules.sample_scores(model, batches)
    assert weights.tolist() == [2, 2, 2, 7, 7, 7, 7, 7, 7, 0]
    mean = float((sample_scores * weights).sum() / weights.sum())
    scores = rules.scores(model, batches)
    assert mean == pytest.approx(-scores.loss if metric == "loss" else scores.score, rel=1e-5)


def test_several_labels_of_a_sample_count_as_one_sample() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    inputs, labels = torch.randn(6, 4), torch.randint(2, (6, 5)).float()
    rules = settled(nn.BCEWithLogitsLoss(), "accuracy", model, (inputs, labels))
    sample_scores, weights = rules.sample_scores(model, [(inputs, labels)])
    assert weights.tolist() == [5.0] * 6
    score = rules.scores(model, [(inputs, labels)]).score
    assert float(sample_scores.mean()) == pytest.approx(score)


def test_outputs_of_several_numbers_give_one_loss_a_sample() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    inputs, targets = torch.randn(6, 4), torch.randn(6, 3)
    rules = settled(mse_loss, "loss", model, (inputs, targets))
    sample_scores, _ = rules.sample_scores(model, [(inputs, targets)])
    expected = -(model(inputs) - targets).square().mean(1)
    torch.testing.assert_close(sample_scores.float(), expected.detach())
