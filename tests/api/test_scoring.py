"""Losses and scores: classes are looked for where they are, and every metric is asked rightly."""

import itertools
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, cross_entropy, l1_loss, mse_loss
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.metric import CompositionalMetric

import esper
from esper.api.scoring import LOSSES, CrossEntropy, Scores, Scoring, class_axes
from esper.leyline.errors import DataError, EsperError
from tests.api.tables import CLASSES, TRAIN, VAL, mlp

SIZES = st.integers(1, 5)


@given(SIZES, st.lists(SIZES, max_size=2), SIZES)
def test_classes_are_found_wherever_they_are(batch: int, more: list[int], classes: int) -> None:
    targets = torch.randint(classes, (batch, *more))
    last = torch.randn(batch, *more, classes)
    second = last.movedim(-1, 1)
    wanted = cross_entropy(last.reshape(-1, classes), targets.reshape(-1))
    if last.shape == second.shape and more:
        for outputs in (last, second):
            assert len(class_axes(outputs, targets)) == 2
            with pytest.raises(DataError, match="second axis or the last"):
                LOSSES["cross_entropy"](outputs, targets)
        return
    for outputs in (last, second):
        if len(class_axes(outputs, targets)) == 1:
            torch.testing.assert_close(LOSSES["cross_entropy"](outputs, targets), wanted)
        else:  # positions that happen to look like classes as well
            with pytest.raises(DataError, match="second axis or the last"):
                LOSSES["cross_entropy"](outputs, targets)


def test_an_axis_that_was_settled_stays_when_a_later_batch_fits_both() -> None:
    long = torch.randn(2, 4, 7), torch.randint(4, (2, 7))  # [B, C, T]
    short = torch.randn(2, 4, 4), torch.randint(4, (2, 4))
    settled = CrossEntropy().settled(*long)
    assert torch.equal(settled(*short), cross_entropy(*short))
    by_position = CrossEntropy().settled(torch.randn(2, 7, 4), long[1])
    wanted = cross_entropy(short[0].transpose(1, 2), short[1])
    torch.testing.assert_close(by_position(*short), wanted)


@pytest.mark.parametrize(("name", "loss"), [("mse", mse_loss), ("l1", l1_loss)])
def test_numbers_are_compared_in_pairs_and_never_all_with_all(name: str, loss: object) -> None:
    outputs, targets = torch.randn(6, 1), torch.randn(6)
    with pytest.raises(DataError, match=r"different shapes.*targets\[:, None\].*squeeze"):
        LOSSES[name](outputs, targets)
    with pytest.raises(DataError, match="targets' shape"):
        LOSSES[name](torch.randn(6, 3), targets)
    assert callable(loss)
    assert torch.equal(LOSSES[name](outputs, targets[:, None]), loss(outputs, targets[:, None]))


class Tagger(nn.Module):
    """A class for each of `T` positions, [B, C, T]."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.act = nn.Conv1d(1, 6, 3, padding=1), nn.ReLU()
        self.last = nn.Conv1d(6, classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))  # type: ignore[no-any-return]


def test_a_tagger_learns_the_class_of_each_position() -> None:
    x = torch.randn(32, 1, 9, generator=torch.Generator().manual_seed(2))
    y = (x[:, 0] > 0).long() + 2 * (x[:, 0] > 1).long()
    run = esper.grow(Tagger(4), (x, y), (x, y), loss="cross_entropy", metric="accuracy", lr=0.02,
                     budget=esper.Budget("+100%", 6), controller="never", slots=["act"],
                     batch_size=8)  # fmt: skip
    outputs = run.export()(x).detach()
    assert run.after["loss"] == pytest.approx(float(cross_entropy(outputs, y)), rel=1e-4)
    assert run.after["score"] == pytest.approx(
        100.0 * float((outputs.argmax(1) == y).float().mean())
    )
    assert run.after["score"] > run.before["score"] + 10.0
    assert run.host.memory.classes == 4


@pytest.mark.parametrize("loss", ["cross_entropy", cross_entropy, lambda o, t: cross_entropy(o, t)])
def test_validation_data_may_be_as_long_as_there_are_classes(loss: object) -> None:
    train, val = ((torch.randn(4, 1, long), torch.randint(4, (4, long))) for long in (9, 4))
    run = esper.grow(Tagger(4), train, val, loss=loss, metric="accuracy", slots=["act"],  # type: ignore[arg-type]
                     budget=esper.Budget("+100%", 1), controller="never")  # fmt: skip
    with torch.no_grad():
        right = float((run.export()(val[0]).argmax(1) == val[1]).double().mean())
    assert run.after["score"] == pytest.approx(100.0 * right)


def test_accuracy_refuses_to_guess_the_axis_and_knows_that_of_torchs_losses() -> None:
    scoring = Scoring.of(lambda outputs, targets: cross_entropy(outputs, targets), "accuracy")
    model = nn.Conv1d(1, 5, 3, padding=1)
    batch = (torch.randn(2, 1, 5), torch.randint(5, (2, 5)))
    with pytest.raises(DataError, match=r"Accuracy cannot tell.*metric='loss'"):
        scoring.settled(model, batch)
    for loss in (cross_entropy, nn.CrossEntropyLoss):
        assert Scoring.of(loss, "accuracy").settled(model, batch).axis == 1


# --- accuracy ----------------------------------------------------------------------------------


class Fixed(nn.Module):
    """Returns what it is given: outputs that a test knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def scored(
    outputs: Tensor, targets: Tensor, loss: object, metric: object = "accuracy", size: int = 2
) -> Scores:
    """Of these outputs, in batches of unequal sizes."""
    batches = list(zip(outputs.split(size), targets.split(size), strict=True))
    scoring = Scoring.of(loss, metric).settled(Fixed(), batches[0])  # type: ignore[arg-type]
    scoring = replace(scoring, first_loss=1.0)
    return scoring.scores(Fixed(), batches)


LABELLED = {  # shape of the targets, and where the classes lie in the outputs
    "one for each sample": ((5,), 1),
    "a tag for each token, last": ((5, 4), 2),
    "a tag for each token, second": ((5, 4), 1),
    "a class for each pixel": ((5, 4, 2), 1),
    "a class for each voxel": ((5, 2, 3, 4), 1),
}


@pytest.mark.parametrize("form", LABELLED)
@pytest.mark.parametrize("ignored", [-100, 255])
def test_accuracy_is_the_share_of_right_labels_wherever_they_are(form: str, ignored: int) -> None:
    shape, axis = LABELLED[form]
    draw = torch.Generator().manual_seed(3)
    outputs = torch.randn(*shape, 3, generator=draw).movedim(-1, axis)
    targets = torch.randint(3, shape, generator=draw)
    targets.view(-1)[::4] = ignored
    targets[4] = ignored  # the last batch alone has no label that counts
    right = counted = 0
    for place in itertools.product(*map(range, shape)):
        label = int(targets[place])
        logits = outputs.movedim(axis, -1)[place]
        counted += label != ignored
        right += label != ignored and int(logits.argmax()) == label
    by_torch = axis == 1
    if not by_torch and ignored != -100:
        return  # "cross_entropy" leaves out -100, as torch's does by itself
    loss = nn.CrossEntropyLoss(ignore_index=ignored) if by_torch else "cross_entropy"
    found = scored(outputs, targets, loss)
    assert found.score == pytest.approx(100.0 * right / counted)
    rows = outputs.movedim(axis, -1).reshape(-1, 3)
    whole = cross_entropy(rows, targets.reshape(-1), ignore_index=ignored)
    assert found.loss == pytest.approx(float(whole)), "a mean over the labels that count"


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 7)], ids=["binary", "column", "many labels"])
@pytest.mark.parametrize("logits", [True, False])
def test_labels_of_their_own_hold_above_what_their_loss_says(
    shape: tuple[int, ...], logits: bool
) -> None:
    draw = torch.Generator().manual_seed(4)
    outputs = torch.randn(shape, generator=draw)
    targets = torch.randint(2, shape, generator=draw).float()
    pairs = zip(outputs.view(-1), targets.view(-1), strict=True)
    right = sum((output > 0) == (target == 1) for output, target in pairs)
    loss = nn.BCEWithLogitsLoss() if logits else binary_cross_entropy
    found = scored(outputs if logits else outputs.sigmoid(), targets, loss)
    assert found.score == pytest.approx(100.0 * int(right) / outputs.numel())
    with pytest.raises(DataError, match="pass a function"):  # whose outputs mean what they like
        scored(outputs, targets, lambda outputs, targets: mse_loss(outputs, targets))


def test_a_class_for_each_pixel_is_learned_and_scored() -> None:
    x = torch.randn(12, 1, 4, 5, generator=torch.Generator().manual_seed(2))
    y = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
    model = nn.Sequential(nn.Conv2d(1, 6, 1), nn.ReLU(), nn.Conv2d(6, 3, 1))
    run = esper.grow(model, (x, y), (x, y), loss=nn.CrossEntropyLoss, metric="accuracy", lr=0.05,
                     budget=esper.Budget("+100%", 4), controller="never", batch_size=5)  # fmt: skip
    right = float((run.export()(x).argmax(1) == y).double().mean())
    assert run.after["score"] == pytest.approx(100.0 * right)
    assert run.host.memory.classes == 3


# --- metrics of one's own ------------------------------------------------------------------------


def test_a_metric_that_overloads_equality_sees_all_batches_before_it_is_asked() -> None:
    outputs = torch.eye(3)[[0, 1, 0, 0, 1, 1, 2]]
    targets = torch.tensor([0, 0, 0, 0, 1, 2, 2])
    for metric in (MulticlassAccuracy(3), MulticlassF1Score(3), MulticlassAccuracy(3) * 1.0):
        metric.update(outputs.flip(0), targets)  # something that was left in it
        found = scored(outputs, targets, "cross_entropy", metric).score
        metric.update(outputs, targets)
        unit = 1.0 if isinstance(metric, CompositionalMetric) else 100.0
        assert found == pytest.approx(unit * float(metric.compute()))
    mean = [scored(o, t, "cross_entropy", MulticlassF1Score(3)).score
            for o, t in zip(outputs.split(2), targets.split(2), strict=True)]  # fmt: skip
    whole = scored(outputs, targets, "cross_entropy", MulticlassF1Score(3)).score
    assert whole != pytest.approx(sum(mean) / len(mean)), "or the mean over batches would do"


def test_a_run_with_an_object_for_a_metric_says_what_its_scores_are() -> None:
    metric = MulticlassAccuracy(CLASSES, average="micro")
    run = esper.grow(mlp(), TRAIN, VAL, loss="cross_entropy", metric=metric, batch_size=13,
                     budget=esper.Budget("+100%", 3), controller="never")  # fmt: skip
    with torch.no_grad():
        right = float((run.export().eval()(VAL[0]).argmax(1) == VAL[1]).double().mean())
    assert run.after["score"] == pytest.approx(100.0 * right, abs=1e-4)
    said = "MulticlassAccuracy over all validation data at once, times 100, since it ends at 1"
    assert f"a score is {said}" in str(run.report())
    assert run.settings.score == said
    assert run.settings.metric is None


def test_a_run_with_an_object_for_a_metric_goes_on_with_it(tmp_path: Path) -> None:
    def copy(record: dict[str, object]) -> None:
        if record["epoch"] == 1:
            shutil.copytree(tmp_path / "run", tmp_path / "copy")

    run = esper.grow(mlp(), TRAIN, VAL, loss=nn.CrossEntropyLoss, metric=MulticlassF1Score(CLASSES),
                     budget=esper.Budget("+100%", 3), controller="never", out=tmp_path / "run",
                     on_epoch=copy)  # fmt: skip
    rest = tmp_path / "copy", mlp(2), TRAIN, VAL
    with pytest.raises(EsperError, match=r"metric was a function or an object.*metric=\.\.\."):
        esper.resume(*rest, loss=nn.CrossEntropyLoss)
    again = esper.resume(*rest, loss=nn.CrossEntropyLoss(), metric=MulticlassF1Score(CLASSES))
    assert again.history == run.history


class Halves:
    """A metric with a state that is of no library."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.device: object = None

    def to(self, device: object) -> None:
        self.device = device

    def reset(self) -> None:
        self.seen = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen.append(float(targets.sum()))

    def compute(self) -> float:
        return max(self.seen) / 2


def test_any_object_that_collects_is_reset_fed_and_asked_once() -> None:
    metric = Halves()
    targets = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert scored(torch.zeros(5), targets, "mse", metric).score == 3.5
    assert metric.seen == []
    assert metric.device == "cpu"
    meaning = Scoring.of("mse", metric).meaning
    assert meaning == "Halves over all validation data at once, taken for percent"


def test_a_class_that_needs_no_arguments_is_as_good_as_an_instance() -> None:
    outputs, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 2])
    made = scored(outputs, targets, nn.CrossEntropyLoss(), "loss")
    assert scored(outputs, targets, nn.CrossEntropyLoss, "loss") == made
    column = targets[:, None].float()
    assert scored(outputs[:, :1], column, nn.MSELoss, Halves).score == 2.0


def test_a_score_made_of_the_loss_is_explained() -> None:
    x, y = TRAIN[0], TRAIN[0][:, :1].double() * 50
    run = esper.grow(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)), (x, y), (x, y),
                     loss="mse", budget=esper.Budget("+100%", 2), controller="never")  # fmt: skip
    text = str(run.report())
    first = run.before["loss"]
    assert f"a score is 100 · exp(−loss / {first:.4g}): 36.8 before training, 100 without" in text
    assert run.before["score"] == pytest.approx(36.788, abs=1e-3)
    assert run.after["score"] == pytest.approx(100.0 * math.exp(-run.after["loss"] / first))


def test_losses_of_samples_are_in_full_precision_whatever_the_model_computes_in() -> None:
    batch = torch.randn(16, 6), torch.randint(3, (16,))
    found = Scoring.of("cross_entropy", "loss", "cpu", "cpu").losses(nn.Linear(6, 3), [batch])
    assert not torch.equal(found, found.bfloat16().float())
