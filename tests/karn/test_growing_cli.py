"""Growing on the command line: a run, its exports, an interruption, data, and places to grow."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import esper
from esper import Audit
from esper.api import read_report
from esper.karn.named_sources import load_data
from esper.nissa import RunReader
from esper.show import theme
from esper.show.progress import GrowthProgress
from tests.karn.own_files import DATA, MODEL, table
from tests.programs import ENVIRONMENT, esper_here, started

EPOCHS = 8
WORDS = ["--budget.params", "+60%", "--budget.epochs", str(EPOCHS), "--lr", "0.02"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("own")
    (home / "net.py").write_text(MODEL, encoding="utf-8")
    (home / "data.py").write_text(DATA, encoding="utf-8")
    np.savez(home / "table.npz", **table())
    return home


@pytest.fixture(autouse=True, scope="module")
def unpainted() -> Iterator[None]:
    """Pictures of pages are made but not painted, which takes the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theme, "render", lambda draw, look: bytes(bool(draw(look))))
        yield


def tensors_of(run: Path) -> list[str]:
    """The checkpoint's file, whose name is the hash of all weights and optimiser states."""
    return [file.name for file in (run / "checkpoint").glob("tensors-*")]


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    told = esper_here(
        "grow", f"{folder}/net.py:Slow", "--data", folder / "table.npz", *WORDS,
        "--out", folder / "whole", "--controller", "periodic",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    lines = [line for line in told.stderr.splitlines() if line.startswith("epoch ")]
    assert len(lines) == EPOCHS
    assert all("loss " in line and "score " in line for line in lines)
    assert "within the budget" in told.stdout
    assert f"esper export {folder / 'whole'}" in told.stdout
    assert "grown:" in told.stdout, "there is something to export"
    assert (folder / "whole" / "report.txt").read_text(encoding="utf-8") in told.stdout
    assert f"The report: {folder / 'whole' / 'report' / 'index.html'}" in told.stdout
    return folder / "whole"


def test_an_interrupted_run_says_how_to_go_on_and_ends_like_a_whole_one(
    run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder / "stopped"
    process = started(
        "grow", f"{folder}/net.py:Slow", "--data", folder / "table.npz", *WORDS,
        "--out", out, "--controller", "periodic",
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("epoch 4/"):
            break
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert f"Go on with: esper resume {out}" in said

    told = esper_here("export", out)
    assert told.returncode == 2
    assert f"esper resume {out}" in told.stderr, "it is not finished"

    watched: list[Path] = []
    monkeypatch.setattr("esper.karn.grow_commands.start_watching", watched.append)
    told = esper_here("resume", out, "--watch")
    assert told.returncode == 0, told.stderr
    assert watched == [out]
    assert f"epoch {EPOCHS}/{EPOCHS}" in told.stderr
    assert "epoch 1/" not in told.stderr
    assert tensors_of(out) == tensors_of(run)
    with RunReader(out) as stopped, RunReader(run) as whole:
        assert stopped.digest() == whole.digest()
        assert "KeyboardInterrupt" in next(stopped.each("notes"))["text"]
    assert (out / "report.txt").read_text() == (run / "report.txt").read_text()


def test_a_finished_run_is_shown_and_not_resumed(run: Path) -> None:
    before = tensors_of(run)
    told = esper_here("resume", run)
    assert told.returncode == 0
    assert f"is finished: {EPOCHS} epochs" in told.stdout
    assert tensors_of(run) == before
    assert (run / "report.txt").read_text() == esper_here("show", run).stdout
    listed = esper_here("runs", run.parent).stdout.replace("\n", " ")
    assert "net.py:Slow" in listed
    assert f"{EPOCHS} of {EPOCHS}" in listed


def test_the_telemetry_of_a_run_is_asked_and_exported(run: Path, tmp_path: Path) -> None:
    counted = "select count(*) as epochs, max(round) as last from epochs"
    told = esper_here("events", run, "--sql", counted)
    assert told.returncode == 0, told.stderr
    assert {str(EPOCHS + 1), str(EPOCHS)} <= set(told.stdout.split())
    told = esper_here("events", run, "--export", tmp_path / "lines.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert told.stdout.startswith(f"{len(lines)} events")
    planted = [line for line in lines if line["type"] == "lifecycle"]
    assert {"GERMINATED", "FOSSILIZED"} <= {line["after"] for line in planted}
    (start,) = (line for line in lines if line["type"] == "runs")
    assert start["config"]["origin"]["model"].endswith("net.py:Slow")


def test_a_run_of_a_program_is_shown_without_its_model(tmp_path: Path) -> None:
    out = tmp_path / "own"
    x, y = torch.randn(64, 6), torch.arange(64) % 2

    def stop(record: dict[str, object]) -> None:
        if record["epoch"] == 3:
            raise KeyboardInterrupt

    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    with pytest.raises(KeyboardInterrupt):
        esper.grow(model, (x, y), (x, y), loss="cross_entropy", budget=esper.Budget("+90%", 8),
                   controller="periodic:every=1", out=out, on_epoch=stop)  # fmt: skip
    told = esper_here("show", out)
    assert told.returncode == 0, told.stderr
    assert "norm at 1: " in told.stdout
    assert "on probation: " in told.stdout
    assert "Stopped after epoch 3: KeyboardInterrupt" in told.stdout
    assert "3 of 8" in esper_here("runs", tmp_path).stdout
    assert esper_here("events", out, "--sql", "select * from epochs").returncode == 0


def test_a_run_leaves_a_page_that_can_be_written_again_without_its_code(
    run: Path, tmp_path: Path
) -> None:
    page = (run / "report" / "index.html").read_text(encoding="utf-8")
    copy = shutil.copytree(run, tmp_path / run.name)
    told = esper_here("report", copy, "--out", tmp_path / "again")
    assert told.stdout == f"Report: {tmp_path / 'again' / 'index.html'}\n"
    assert (tmp_path / "again" / "index.html").read_text(encoding="utf-8") == page


USED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from model import Model
x, written = torch.linspace(-1, 1, 30).reshape(5, 6), Model()
with torch.no_grad():
    assert torch.equal(torch.export.load(sys.argv[2]).module()(x), written(x))
written(x).sum().backward()
assert all(p.grad is not None for p in written.parameters())
assert "esper" not in sys.modules
print("same")
"""


def test_all_formats_are_written_and_checked_and_run_without_esper(run: Path) -> None:
    for name in ("pt2", "onnx", "python"):
        told = esper_here("export", run, "--format", name)
        assert told.returncode == 0, told.stderr
        ran, wrote, use = told.stdout.splitlines()
        assert ran == f"Running the code in {run.parent / 'net.py'}"
        difference = float(wrote.rpartition(" ")[2])
        assert difference < 1e-5 if name == "onnx" else difference == 0.0
        assert use.startswith("Use it: ")
    places = [run / "python", run / "model.pt2"]
    told = subprocess.run(
        [sys.executable, "-I", "-c", USED, *map(str, places)],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert told.stdout == "same\n", told.stderr


def test_a_model_that_was_moved_is_found_with_an_option(run: Path, folder: Path) -> None:
    moved = folder / "elsewhere" / "moved.py"
    moved.parent.mkdir()
    moved.write_text(MODEL, encoding="utf-8")
    out = folder / "moved.pt2"
    told = esper_here("export", run, "--format", "pt2", "--out", out, "--model", f"{moved}:Slow")
    assert told.returncode == 0, told.stderr
    assert out.is_file()


def test_data_and_model_may_be_functions_and_the_loss_follows_from_the_targets(
    folder: Path,
) -> None:
    told = esper_here(
        "grow", f"{folder}/net.py:regressor", "--data", f"{folder}/data.py:loaders",
        "--budget.params", "none", "--budget.epochs", "1", "--controller", "never", "--quiet",
        "--out", folder / "regression",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines() == [
        f"{folder / 'regression'} is finished. Write its network: "
        f"esper export {folder / 'regression'}"
    ]
    report = (folder / "regression" / "report.txt").read_text(encoding="utf-8")
    assert "score: " in report, "a score of its loss, not an accuracy"


def test_inputs_that_are_not_tensors_alone_are_taken_from_the_data_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder / "scaled"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GrowthProgress, "__call__", interrupt)
        told = esper_here(
            "grow", f"{folder}/net.py:Scaled", "--data", f"{folder}/data.py:scaled",
            "--budget.params", "none", "--budget.epochs", "2", "--controller", "never",
            "--out", out,
        )  # fmt: skip
    assert told.returncode == 130, told.stderr
    assert not (out / "sample").exists()
    for words in (("resume", out), ("export", out)):
        told = esper_here(*words)
        assert told.returncode == 0, told.stderr
        ran = f"Running the code in {folder / 'net.py'}, {folder / 'data.py'}"
        assert told.stdout.splitlines()[0] == ran
    assert (out / "python" / "model.py").is_file()


def test_places_are_listed_with_what_each_would_cost(folder: Path) -> None:
    told = esper_here("inspect", f"{folder}/net.py:Slow", "--data", folder / "table.npz")
    assert told.returncode == 0, told.stderr
    assert "Slow: 224 parameters, at most 33 more" in told.stdout
    assert "body.0" in told.stdout
    told = esper_here(
        "inspect", f"{folder}/net.py:Slow", "--data", folder / "table.npz",
        "--budget.params", "none",
    )  # fmt: skip
    assert "wide" in told.stdout, "what there was no room for"


def test_what_a_model_lacks_is_printed_and_written(folder: Path, tmp_path: Path) -> None:
    told = esper_here(
        "audit", f"{folder}/net.py:Slow", "--data", folder / "table.npz", "--budget.params", "+60%",
        "--epochs", "1", "--out", tmp_path / "audit", "--json", tmp_path / "audit.json",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert "Audit of Slow: " in told.stderr
    assert "Slow: 224 parameters, at most 134 more" in told.stdout
    assert "seeds that fit were heard" in told.stdout
    found = Audit.of_json((tmp_path / "audit.json").read_text(encoding="utf-8"))
    assert str(found) in told.stdout
    assert (tmp_path / "audit" / "audit.json").read_text(encoding="utf-8") == found.to_json()
    page = (tmp_path / "audit" / "audit.html").read_text(encoding="utf-8")
    assert "Esper · audit of Slow" in page
    assert all(f"<td>{each.slot}</td>" in page for each in found.candidates)
    assert (tmp_path / "audit" / "audit.png").read_bytes().startswith(b"\x89PNG")


def test_runs_are_numbered_where_no_directory_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        told = esper_here(
            "grow", f"{folder}/net.py:Slow", "--data", folder / "table.npz", "--budget.epochs", "1",
            "--controller", "never", "--samples", "16",
        )  # fmt: skip
        assert told.returncode == 0, told.stderr
        assert Path(f"runs/slow-{number}/checkpoint").is_dir()


# --- data --------------------------------------------------------------------------------------


def test_known_data_sets_are_found_by_name() -> None:
    data = load_data("digits")
    assert data["train"][0].shape[1:] == (1, 8, 8)
    assert "test" in data
    flat = load_data("digits", flat=True, samples=100)
    assert flat["train"][0].shape == (100, 64)
    assert flat["val"][0].shape[1:] == (64,)
    assert torch.equal(flat["train"][1], data["train"][1][:100])


def test_a_function_may_say_that_there_are_no_test_data(tmp_path: Path) -> None:
    pair = "(torch.zeros(9, 2, 3), torch.zeros(9))"
    (tmp_path / "own.py").write_text(
        f"import torch\ndef both():\n    return {pair}, {pair}, None\n", encoding="utf-8"
    )
    data = load_data(f"{tmp_path}/own.py:both", flat=True)
    assert data.keys() == {"train", "val"}
    assert data["val"][0].shape == (9, 6)


def test_a_file_without_splits_is_split_at_random_and_the_same_way_every_time(
    tmp_path: Path,
) -> None:
    arrays = table()
    np.savez(tmp_path / "table.npz", **arrays)
    first, again, other = (load_data(f"{tmp_path}/table.npz", seed=s) for s in (0, 0, 1))
    assert torch.equal(first["val"][0], again["val"][0])
    assert not torch.equal(first["val"][0], other["val"][0])
    rows = {tuple(row) for split in (first["train"], first["val"]) for row in split[0].tolist()}
    assert rows == {tuple(row) for row in arrays["inputs"].tolist()}
    assert len(first["val"][0]) == len(arrays["inputs"]) // 5


def test_files_keep_their_own_splits_and_numbers_get_the_types_that_models_take(
    tmp_path: Path,
) -> None:
    tensors = {
        f"{split}_{part}": values
        for split in ("train", "val", "test")
        for part, values in (
            ("inputs", torch.randint(256, (4, 2, 3), dtype=torch.uint8)),
            ("targets", torch.rand(4, dtype=torch.float64)),
        )
    }
    save_file(tensors, tmp_path / "images.safetensors")
    data = load_data(f"{tmp_path}/images.safetensors")
    assert torch.equal(data["test"][0], tensors["test_inputs"].float() / 255)
    assert data["train"][1].dtype == torch.float32
    save_file({"inputs": torch.ones(5, 2, dtype=torch.int32), "targets": torch.ones(5).int()},
              tmp_path / "words.safetensors")  # fmt: skip
    words = load_data(f"{tmp_path}/words.safetensors")
    assert words["train"][0].dtype == words["train"][1].dtype == torch.int64


def test_a_run_knows_where_it_came_from(run: Path, folder: Path) -> None:
    manifest = json.loads((run / "checkpoint" / "manifest.json").read_text(encoding="utf-8"))
    origin = manifest["body"]["notes"]["settings"]["origin"]
    assert origin["model"] == f"{folder / 'net.py'}:Slow"
    assert origin["data"] == str(folder / "table.npz")


def test_device_precision_and_decay_are_options_that_a_run_keeps(folder: Path) -> None:
    out = folder / "half"
    told = esper_here(
        "grow", f"{folder}/net.py:Slow", "--data", folder / "table.npz", "--out", out,
        "--budget.epochs", "2", "--controller", "never", "--budget.params", "none",
        "--device", "auto", "--precision", "bf16", "--weight-decay", "0.2",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    there = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert f", on {there}" in told.stdout.splitlines()[0]
    assert " in bf16 precision" in told.stdout
    settings = read_report(out).settings
    assert (settings["precision"], settings["weight_decay"]) == ("bf16", 0.2)
    assert settings["device"].startswith(there)
