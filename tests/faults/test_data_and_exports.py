"""Data that cannot be learned from, networks that are not to be exported, and files that are not
what was written."""

import math
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.api.ticking import NotFiniteError
from esper.kasmina import blueprint, export_python, unregister_blueprint, zeroed
from esper.leyline.errors import EsperError, ExportError, printable
from esper.simic.training import train_run
from tests.programs import esper_here
from tests.simic.training.tiny import tiny_run

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def grow(model: nn.Module, train: Any, val: Any = (X, Y), **more: Any) -> Any:
    given = {"loss": "cross_entropy", "budget": None, "controller": "never", "epochs": 1}
    return esper.grow(model, train, val, quiet=True, **given | more)


def spoiled(place: int, value: float) -> tuple[Tensor, Tensor]:
    inputs = X.clone()
    inputs[place, 1] = value
    return inputs, Y


def mislabelled(place: int, label: int) -> tuple[Tensor, Tensor]:
    labels = Y.clone()
    labels[place] = label
    return X, labels


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("wrap", [tuple, lambda pair: DataLoader(TensorDataset(*pair), 16)])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (spoiled(37, math.nan), "NaN or infinity in sample 37 of {}"),
        (spoiled(63, math.inf), "NaN or infinity in sample 63 of {}"),
        (mislabelled(41, 2), "label 2 of 2 classes in sample 41 of {}"),
        (mislabelled(40, -3), "label -3 of 2 classes in sample 40 of {}"),
    ],
)
def test_what_is_wrong_in_the_data_is_named_by_split_and_place(
    split: str, wrap: Callable[[Any], Any], data: tuple[Tensor, Tensor], said: str
) -> None:
    parts = {"train": (X, Y), "val": (X, Y)} | {split: wrap(data)}
    if split == "train" and "label" in said and wrap is tuple:  # it is in the first batch of all
        said = "labels from .* valid: 0 to 1"
    with pytest.raises(EsperError, match=said.format(split)):
        grow(net(), parts["train"], parts["val"], batch_size=16)


def test_a_loss_that_turns_nan_says_in_which_batch_and_what_grew_last() -> None:
    with pytest.raises(NotFiniteError, match=r"not finite in batch \d+ of 4.*nothing has grown"):
        grow(net(), (X, Y), optimizer="SGD", lr=1e38, batch_size=16)


class Explosive(nn.Module):
    """A seed that is nothing when it is new, and more than numbers hold after a step."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = zeroed(nn.Linear(channels, channels))

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.layer(h) * 1e30 * 1e30
        return out


@pytest.fixture
def explosive() -> Iterator[None]:
    blueprint("explosive", "dense")(lambda spec: Explosive(spec.channels))
    yield
    unregister_blueprint("explosive", "dense")


@pytest.mark.usefixtures("explosive")
def test_a_loss_that_turns_nan_while_a_seed_grows_costs_the_newest_seed(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    same: dict[str, Any] = {"slots": ["1"], "epochs": 4, "batch_size": 16}
    bad = same | {"controller": "fixed:slot=1,blueprint=explosive,epoch=2"}
    run = grow(net(), (X, Y), out=tmp_path / "run", on_epoch=told.append, **bad)
    assert run.finished
    assert [record["epoch"] for record in told] == [1, 2, 3, 4]
    (back,) = [record for record in told if "rollback" in record]
    assert back["rollback"]["seed"] == "explosive at 1"
    assert "not finite" in back["rollback"]["what"]
    assert back["rollback"]["flops"] > run.history[0]["flops"], "the seed ran in the failed epoch"
    failed_epochs = back["rollback"]["flops"] / run.history[0]["flops"]
    others = sum(record["flops"] for record in run.history) / run.history[0]["flops"]
    assert run.report().relative_cost == pytest.approx((others + failed_epochs) / 4)
    assert ("1", "PRUNED", "GOVERNOR") in [
        (each["slot"], each["after"], each["cause"]) for each in back["events"]
    ]
    assert all(math.isfinite(record["val_loss"]) for record in told)
    assert "explosive at 1 was taken out" in str(run.report())
    assert "ANOMALY The loss is not finite" in esper_here("show", tmp_path / "run").stdout
    alone = grow(net(), (X, Y), **same)
    for mine, its in zip(run.export().parameters(), alone.export().parameters(), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.usefixtures("explosive")
def test_the_second_time_a_loss_turns_nan_ends_the_run() -> None:
    again = {"slots": ["1"], "controller": "fixed:slot=1,blueprint=explosive,epoch=2"}
    seen: list[dict[str, Any]] = []
    with pytest.raises(NotFiniteError, match=r"batch 2 of 4.*last: plant explosive at 1"):
        grow(net(), (X, Y), epochs=9, batch_size=16, on_epoch=seen.append, **again)
    assert sum("rollback" in record for record in seen) == 1


@pytest.fixture(scope="module")
def grown() -> Any:
    return grow(net(), (X, Y))


def test_a_network_of_nans_is_not_exported(grown: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        weight = next(grown.host.parameters())
        before = weight.clone()
        weight[0, 0] = math.nan
    try:
        with pytest.raises(ExportError, match="is not a number"):
            export_python(grown.host, grown.sample, tmp_path / "network")
        with pytest.raises(ExportError, match="is not a number"):
            grown.export()
        assert not list(tmp_path.iterdir())
    finally:
        weight.data.copy_(before)


def test_every_changed_byte_of_exported_weights_is_noticed(grown: Any, tmp_path: Path) -> None:
    draw = random.Random(0)
    export_python(grown.host, grown.sample, tmp_path / "python")
    code, file = (tmp_path / "python" / name for name in ("model.py", "weights.safetensors"))
    run_path(str(code))["Model"]()
    whole = file.read_bytes()
    for _ in range(45):
        data = bytearray(whole)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        with pytest.raises(ValueError, match="damaged, or other weights"):
            run_path(str(code))["Model"]()


def test_files_have_the_modes_of_the_users_mask(tmp_path: Path) -> None:
    for mask in (0o022, 0o077, 0o002):
        place = tmp_path / f"{mask:o}"
        before = os.umask(mask)
        try:
            place.mkdir()
            run = grow(net(), (X, Y), out=place / "run")
            export_python(run.host, run.sample, place / "python")
            assert train_run(tiny_run(place / "training", rounds=1, checkpoint_every=1))
        finally:
            os.umask(before)
        for file in place.rglob("*"):
            usual = 0o777 if file.is_dir() else 0o666
            assert stat.S_IMODE(file.stat().st_mode) == usual & ~mask, file


def test_nothing_that_a_terminal_obeys_comes_from_a_file(tmp_path: Path) -> None:
    evil = "\x1b]0;mine\x07\x1b[2J\x9b31m"
    assert printable(f"a{evil}b\n\té") == "a�]0;mine��[2J�31mb\n\té"
    path = tmp_path / evil.replace("/", "")
    for words in (["show", path], ["resume", path], ["runs", path], ["export", path]):
        told = esper_here(*words)
        assert told.returncode == 2
        assert "\x1b" not in told.stderr + told.stdout
