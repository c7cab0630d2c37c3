"""What a run keeps to look at: slots, costs, the model's parts; as lines, a figure and a page."""

import importlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import esper
from esper.api import GrownRun, load_run, read_report
from esper.api.run_records import model_notes, step_flops
from esper.leyline.errors import EsperError
from tests.api.tables import FEATURES, TRAIN, VAL, Script, mlp, wrapped

EPOCHS = 8


def grown(**options: Any) -> GrownRun:
    usual = {"loss": "cross_entropy", "budget": esper.Budget("+120%", EPOCHS), "slots": ["2", "5"]}
    return esper.grow(
        mlp(),
        TRAIN,
        VAL,
        **{**usual, "controller": "periodic:first=1", "batch_size": 16, **options},
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> GrownRun:
    return grown(out=tmp_path_factory.mktemp("runs") / "mine", quiet=True)


def test_how_it_goes_is_said_on_standard_error_unless_it_shall_be_quiet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    grown()
    told = capsys.readouterr()
    about, *lines = told.err.splitlines()
    assert about.startswith("on cpu in full precision; a score is ")
    assert [line.split(" · ")[0] for line in lines] == [
        f"epoch {number}/{EPOCHS}" for number in range(1, EPOCHS + 1)
    ]
    assert told.out == ""
    grown(quiet=True)
    assert capsys.readouterr().err == ""


def test_records_say_what_slots_hold_and_agree_with_the_events(kept: GrownRun) -> None:
    for record in kept.history:
        for event in record["events"]:
            last = [e["after"] for e in record["events"] if e["slot"] == event["slot"]][-1]
            assert record["slots"].get(event["slot"], {"stage": "DORMANT"})["stage"] == last
        held = [slot for slot in record["slots"].values() if slot.get("blueprint")]
        assert sum(slot["params"] for slot in held) == record["added"]
    assert any(record["slots"] for record in kept.history)


def test_operations_are_three_forward_passes_and_two_while_a_seed_trains_alone() -> None:
    host = wrapped(isolation="dual_pass")
    plain = sum(
        2 * layer.in_features * layer.out_features * len(host.sample)
        for layer in host.model.modules()
        if isinstance(layer, nn.Linear)
    )
    assert step_flops(host) == 3 * plain
    host.germinate(next(iter(host.seed_slots)), "norm")
    assert host.has_isolated_seeds
    assert step_flops(host) == 2 * 3 * plain, "norm has no products of matrices"


def test_relative_cost_equals_count_by_hand() -> None:
    # From epoch 3 to epoch 4 the seed trains in isolation, in a second pass. A norm has no matrix
    # products, so a second pass costs another pass of the model.
    script = Script({2: ("plant", "2", "norm", "ramp"), 4: ("blend in", "2")})
    run = grown(controller=script, quiet=True)
    stages = [record["slots"].get("2", {}).get("stage") for record in run.history]
    assert stages[1:4] == ["TRAINING", "TRAINING", "BLENDING"]
    weights = sum(
        layer.in_features * layer.out_features
        for layer in mlp().modules()
        if isinstance(layer, nn.Linear)
    )
    epoch = 3 * 2 * weights * len(TRAIN[0])
    assert run.report().epochs[0].flops == epoch
    assert run.report().flops == epoch * (EPOCHS + 2)
    assert run.report().relative_cost == pytest.approx((EPOCHS + 2) / EPOCHS)


def test_plain_training_has_relative_cost_one() -> None:
    assert grown(controller="never", quiet=True).report().relative_cost == 1.0


def test_relative_cost_is_unknown_without_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.api.grow_loop.step_flops", lambda host: None)
    assert grown(controller="never", quiet=True).report().relative_cost is None


def test_what_cannot_be_counted_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    host = wrapped()

    def fail(*_: object) -> None:
        raise RuntimeError("not under a counter")

    monkeypatch.setattr(host.model, "forward", fail)
    assert step_flops(host) is None


def test_a_kept_run_says_the_same_from_its_folder_without_its_model(kept: GrownRun) -> None:
    assert kept.folder is not None
    assert asdict(read_report(kept.folder.path)) == asdict(kept.report())
    again = load_run(kept.folder.path, mlp()).report()
    assert asdict(again) == asdict(kept.report())


def test_parts_are_opened_where_slots_are_and_many_alike_are_one() -> None:
    class Block(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, 8), nn.ReLU())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.stem = nn.Linear(FEATURES, 8)
            self.blocks = nn.Sequential(*(Block() for _ in range(5)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(self.scale * self.stem(x))  # type: ignore[no-any-return]

    host = esper.wrap(Net(), torch.randn(5, FEATURES), slots=["blocks.1.1", "blocks"])
    parts = [
        (part["path"], part["kind"], part["depth"], part["opened"], part["slots"])
        for part in model_notes(host)["parts"]
    ]
    assert parts == [
        ("scale", "Parameter", 0, False, ()),
        ("stem", "Linear", 0, False, ()),
        ("blocks", "Sequential", 0, True, ()),
        ("blocks.0", "Block", 1, False, ()),
        ("blocks.1", "Block", 1, True, ()),
        ("blocks.1.0", "Linear", 2, False, ()),
        ("blocks.1.1", "ReLU", 2, False, ("blocks.1.1",)),
        ("blocks.2 … 4", "3 × Block", 1, False, ()),
        ("blocks", "Sequential's output", 1, False, ("blocks",)),
    ]
    closed = [part for part in model_notes(host)["parts"] if not part["opened"]]
    assert sum(part["params"] for part in closed) == host.catalogue.host_params


def test_a_run_draws_itself_and_writes_its_page(
    kept: GrownRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.show.theme.render", lambda draw, theme: bytes(bool(draw(theme))))
    assert isinstance(kept.plot(), Figure)
    assert kept.plot(dark=True).get_facecolor() != kept.plot().get_facecolor()
    page = kept.write_report(tmp_path / "page")
    assert page == tmp_path / "page" / "index.html"
    assert "What it cost" in page.read_text(encoding="utf-8")
    with pytest.raises(EsperError, match="no folder for its report"):
        grown(quiet=True, epochs=None, budget=esper.Budget(0, 1), controller="never").write_report()


def test_without_matplotlib_a_run_says_how_to_get_it_and_shows_words(
    kept: GrownRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("esper.show.growth_page")  # as whoever has drawn something before
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EsperError, match=r"pip install '\.\[report\]'"):
        kept.plot()
    assert kept._repr_html_().startswith(f"<pre>{EPOCHS} of {EPOCHS} epochs")


def test_a_notebook_shows_the_head_of_the_page(
    kept: GrownRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.show.theme.render", lambda draw, theme: b"painted")
    assert f"In {EPOCHS} epochs" in kept._repr_html_()
