"""Learning-rate schedulers: made with a word about what is wrong, stepped rightly, kept whole."""

import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import LinearLR, LRScheduler, MultiStepLR, SequentialLR

import esper
from esper.archive import packed, unpacked
from esper.leyline.errors import EsperError
from tests.api.tables import TRAIN, VAL, mlp, require_same, states

EPOCHS = 6
SETTINGS: dict[str, Any] = {
    "loss": "cross_entropy",
    "budget": esper.Budget("+100%", EPOCHS),
    "controller": "never",
    "batch_size": 32,
    "slots": ["2"],
}
Make = Callable[[Optimizer], LRScheduler]


def interrupted(folder: Path, make: Make, after: int = 3) -> Path:
    def interrupt(record: dict[str, Any]) -> None:
        if record["epoch"] == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        esper.grow(mlp(), TRAIN, VAL, scheduler=make, out=folder, on_epoch=interrupt, **SETTINGS)
    return folder


def warm_steps(optimizer: Optimizer) -> LRScheduler:
    parts = [LinearLR(optimizer, 0.1, 1.0, 2), MultiStepLR(optimizer, [2, 3])]
    return SequentialLR(optimizer, parts, [2])


def plateau(optimizer: Optimizer) -> LRScheduler:
    return torch_schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)


def chained(optimizer: Optimizer) -> LRScheduler:
    parts = [MultiStepLR(optimizer, [4]), torch_schedulers.ExponentialLR(optimizer, 0.9)]
    return torch_schedulers.ChainedScheduler(parts, optimizer)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: MultiStepLR(optimizer, [2, 4]),
        lambda optimizer: MultiStepLR(optimizer, np.array([2, 4, 4])),
        warm_steps,
        chained,
        plateau,
        lambda optimizer: torch_schedulers.CyclicLR(optimizer, 1e-3, 1e-2, 2, cycle_momentum=False),
        lambda optimizer: torch_schedulers.LambdaLR(optimizer, lambda epoch: 0.8**epoch),
    ],
    ids=["steps", "numpy steps", "sequential", "chained", "plateau", "cyclic", "lambda"],
)
def test_rates_move_after_a_stop_as_if_there_had_been_none(tmp_path: Path, make: Make) -> None:
    whole = esper.grow(mlp(), TRAIN, VAL, scheduler=make, **SETTINGS)
    again = esper.resume(interrupted(tmp_path / "run", make), mlp(7), TRAIN, VAL, scheduler=make)
    assert again.history == whole.history
    require_same(states(whole.host), states(again.host))
    assert whole.host.optimizers[0].param_groups[0]["lr"] != 1e-3  # it has moved


PLAIN = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
STATES = st.recursive(
    PLAIN | st.dictionaries(st.integers(), st.integers()).map(Counter),
    lambda part: (
        st.lists(part)
        | st.tuples(part, part)
        | st.dictionaries(KEYS, part)
        | st.dictionaries(KEYS, part).map(OrderedDict)
    ),
)


def same(left: Any, right: Any) -> bool:
    """Equal, and of the same types all the way down: 1 is not True, and (1,) is not [1]."""
    if type(left) is not type(right) or left != right:
        return False
    if isinstance(left, dict):
        return all(map(same, left, right)) and all(map(same, left.values(), right.values()))
    return not isinstance(left, (list, tuple)) or all(map(same, left, right))


@pytest.mark.slow
@given(STATES)
def test_any_state_comes_back_with_its_types(state: Any) -> None:
    assert same(unpacked(json.loads(json.dumps(packed(state, {}, of="It"))), {}), state)


def test_what_would_not_come_back_is_refused_before_it_is_kept(tmp_path: Path) -> None:
    class Hoarder(torch_schedulers.ConstantLR):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "seen": [{1, 2}]}

    with pytest.raises(EsperError, match=r"cannot be saved; given: state\.seen\.0: set"):
        esper.grow(mlp(), TRAIN, VAL, scheduler=Hoarder, out=tmp_path / "run", **SETTINGS)
    assert esper.grow(mlp(), TRAIN, VAL, scheduler=Hoarder, **SETTINGS).finished  # nothing is kept


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_plateau_is_one_of_the_validation_loss_or_of_the_score(mode: Any) -> None:
    seen: list[float] = []

    class Watching(torch_schedulers.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: int | None = None) -> None:
            seen.append(metrics)
            super().step(metrics)

    run = esper.grow(mlp(), TRAIN, VAL, scheduler=lambda optimizer: Watching(optimizer, mode),
                     **SETTINGS)  # fmt: skip
    key = "val_loss" if mode == "min" else "score"
    assert seen == [record[key] for record in run.history]


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (
            torch_schedulers.StepLR,
            "could not be made; given: StepLR: .*step_size.*as in scheduler=",
        ),
        (lambda optimizer: None, "could not be made; given: .*: NoneType is no scheduler"),
        (lambda optimizer: MultiStepLR, "could not be made; given: .*: type is no scheduler"),
    ],
)
def test_what_makes_no_scheduler_is_told(make: Any, advice: str) -> None:
    with pytest.raises(EsperError, match=advice):
        esper.grow(mlp(), TRAIN, VAL, scheduler=make, **SETTINGS)


def test_another_scheduler_than_the_runs_is_refused(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "run", warm_steps)
    with pytest.raises(EsperError, match="another scheduler; given: ReduceLROnPlateau; valid: Seq"):
        esper.resume(folder, mlp(), TRAIN, VAL, scheduler=plateau)
