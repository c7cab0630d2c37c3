"""Named losses: shapes that do not fit are told, and classes are looked for where they are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, l1_loss, mse_loss

import esper
from esper.api.scoring import LOSSES, CrossEntropy, Scoring, class_axes
from esper.leyline.errors import DataError

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


def test_accuracy_refuses_to_guess_the_axis() -> None:
    scoring = Scoring.of(cross_entropy, "accuracy")
    model = nn.Conv1d(1, 5, 3, padding=1)
    with pytest.raises(DataError, match=r"Accuracy cannot tell.*metric='loss'"):
        scoring.settled(model, (torch.randn(2, 1, 5), torch.randint(5, (2, 5))))
