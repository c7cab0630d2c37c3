"""Growing on the command line, done wrong: no traceback, one sentence that says what to do."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.karn.own_files import DATA, MODEL, refused, table
from tests.programs import esper, esper_here
from tests.simic.training.tiny import tiny_run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are right and files that are wrong."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "net.py").write_text(MODEL, encoding="utf-8")
    (folder / "data.py").write_text(DATA, encoding="utf-8")
    (folder / "typo.py").write_text("class Net(\n", encoding="utf-8")
    (folder / "missing.py").write_text("import tourch\n", encoding="utf-8")
    (folder / "script.py").write_text("raise SystemExit('usage: ...')", encoding="utf-8")
    (folder / "notes.txt").write_text("no code", encoding="utf-8")
    right = table()
    np.savez(folder / "table.npz", **right)
    np.savez(folder / "other.npz", inputs=right["inputs"] + 1, targets=right["targets"])
    np.savez(folder / "named.npz", x=right["inputs"], y=right["targets"])
    np.savez(folder / "short.npz", inputs=right["inputs"], targets=right["targets"][:50])
    np.savez(folder / "objects.npz", inputs=np.array([{}]), targets=np.array([None]))
    np.savez(folder / "wide.npz", inputs=np.zeros((30, 9), np.float32), targets=np.zeros(30, int))
    fractions = right["targets"].astype(np.float32)
    np.savez(folder / "fractions.npz", inputs=right["inputs"], targets=fractions)
    np.savez(folder / "rows.npz", inputs=right["inputs"], targets=np.eye(4)[right["targets"]])
    np.savez(folder / "holes.npz", inputs=right["inputs"] * np.nan, targets=right["targets"])
    sides = {"val_inputs": right["inputs"][:, :5], "val_targets": right["targets"]}
    both = {f"train_{name}": array for name, array in right.items()} | sides
    np.savez(folder / "sides.npz", **both)
    torch.save({"weight": torch.ones(1)}, folder / "weights.pt")
    np.savez(folder / "labels.npz", inputs=right["inputs"], targets=right["targets"] + 90)
    whole = (folder / "table.npz").read_bytes()
    (folder / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (folder / "bent.npz").write_bytes(whole[:150] + b"??" + whole[152:])
    np.save(folder / "single.npy", right["inputs"])
    (folder / "single.npy").rename(folder / "single.npz")
    np.savez(folder / "scalar.npz", inputs=right["inputs"], targets=np.array(3))
    np.savez(folder / "complex.npz", inputs=right["inputs"] * 1j, targets=right["targets"])
    (folder / "damaged.safetensors").write_bytes(b"\xff" * 40)
    save_file({"inputs": torch.ones(3), "targets": torch.ones(3)}, folder / "flat.safetensors")
    (folder / "full").mkdir()
    (folder / "full" / "diary.txt").write_text("mine", encoding="utf-8")
    return folder


def grow(home: Path, *words: str, model: str = "net.py:Slow", data: str = "table.npz") -> list[str]:
    """The words of a short run, with whatever is wrong in it."""
    if (home / data.partition(":")[0]).exists() or data.endswith((".npz", ".safetensors")):
        data = f"{home}/{data}"
    short = ["--budget.epochs", "1", "--controller", "never", "--budget.params", "+60%"]
    return ["grow", f"{home}/{model}", "--data", data, "--out", str(home / "out"), *short, *words]


CASES = {
    "typo in the class": ({"model": "net.py:Slw"}, (), "did you mean 'Slow'?"),
    "no class named": ({"model": "net.py"}, (), "Say which part of"),
    "typo in the file": ({"model": "nett.py:Slow"}, (), "there are data.py, missing.py, net.py"),
    "no such folder": ({"model": "models/net.py:Slow"}, (), "there is no folder"),
    "not Python": ({"model": "notes.txt:Slow"}, (), "valid: FILE.py:NAME"),
    "not a module": ({"model": "net.py:number"}, (), "does not give a model; given: int"),
    "gives no module": ({"model": "net.py:numbers"}, (), "does not give a model; given: list"),
    "needs arguments": ({"model": "net.py:Wide"}, (), "argument: 'width'; write a function"),
    "fails when built": ({"model": "net.py:Failing"}, (), "NameError: name 'missing' is not"),
    "syntax error": ({"model": "typo.py:Net"}, (), "cannot be imported; given: SyntaxError"),
    "import error": ({"model": "missing.py:Net"}, (), "No module named 'tourch' (line 1)"),
    "typo in the data": ({"data": "digts"}, (), "did you mean 'digits'?"),
    "removed data set": ({"data": "mnist"}, (), "Reading IDX files was removed in 0.2.0"),
    "removed data set with a dash": ({"data": "fashion-mnist"}, (), "data set 'fashion_mnist'"),
    "removed CIFAR data set": ({"data": "cifar10"}, (), "check out commit 28b7a14"),
    "no such data file": ({"data": "tabel.npz"}, (), "tabel.npz; check the path of --data"),
    "other arrays": ({"data": "named.npz"}, (), "given: x, y; valid: inputs and targets"),
    "too few targets": ({"data": "short.npz"}, (), "[120, 6], targets int64 [50]; valid"),
    "objects": ({"data": "objects.npz"}, (), "cannot be read; given: Object arrays"),
    "damaged": ({"data": "damaged.safetensors"}, (), "cannot be read"),
    "cut short": ({"data": "cut.npz"}, (), "cannot be read; given: File is not a zip file"),
    "bent": ({"data": "bent.npz"}, (), "cannot be read; given: Bad CRC-32"),
    "one array": ({"data": "single.npz"}, (), "cannot be read"),
    "targets without an axis": ({"data": "scalar.npz"}, (), "[120, 6], targets int64 []"),
    "complex": ({"data": "complex.npz"}, (), "given: inputs complex64 [120, 6]"),
    "no batch": ({"data": "flat.safetensors"}, (), "inputs float32 [3], targets float32 [3]"),
    "wrong shape": ({"data": "wide.npz"}, (), "The model fails on the sample"),
    "impossible labels": ({"data": "labels.npz"}, (), "check the model's last layer"),
    "data of one part": ({"data": "data.py:one"}, (), "valid: (train, val) or"),
    "data needs arguments": ({"data": "data.py:needy"}, (), "that returns (train, val)"),
    "data without a name": ({"data": "data.py"}, (), "data.py:loaders"),
    "loaders cut": ({"data": "data.py:loaders"}, ("--samples", "5"), "do the same in your"),
    "targets of no kind": ({"data": "data.py:named"}, (), "targets dict; valid: [B, C]"),
    "ends itself": ({"model": "script.py:Net"}, (), "cannot be imported; given: SystemExit"),
    "no samples": ({}, ("--samples", "0"), "something to train on"),
    "unreadable budget": ({}, ("--budget.params", "much"), "Cannot read this budget"),
    "no room": ({}, ("--budget.params", "3", "--slots", "head"), "no room for any seed"),
    "no epochs": ({}, ("--budget.epochs", "0"), "a whole number from 1"),
    "unknown place": ({}, ("--slots", "bodi.0"), "did you mean 'body.0'?"),
    "unknown controller": ({}, ("--controller", "heuristik"), "did you mean 'heuristic'?"),
    "unknown optimiser": ({}, ("--optimizer", "AdmW"), "did you mean 'AdamW'?"),
    "negative rate": ({}, ("--lr", "-1"), "'lr' is out of range; given: -1.0; valid: a number abo"),
    "no batches": ({}, ("--batch-size", "0"), "given: 0; valid: a whole number from 1"),
    "wrong loss": ({}, ("--loss", "mse"), "outputs and the targets have different shapes"),
    "fractions for labels": (
        {"data": "fractions.npz"}, ("--loss", "cross_entropy"), "targets.long()"),
    "rows for labels": (
        {"data": "rows.npz"}, ("--loss", "cross_entropy"), "targets.argmax(-1)"),
    "a number for each class": ({"data": "fractions.npz"}, (), "have different shapes"),
    "NaN": ({"data": "holes.npz"}, (), "in sample 0 of train; look for NaN"),
    "two widths": ({"data": "sides.npz"}, (), "The model fails on the val data"),
    "weights for a model": ({"model": "weights.pt:Net"}, (), "valid: FILE.py:NAME"),
    "compiled": ({"model": "net.py:compiled"}, (), "is inside compiled code, which"),
    "negative decay": ({}, ("--weight-decay", "-1"), "'weight_decay' is out of range"),
    "steps of its own": ({}, ("--optimizer", "LBFGS"), "such as SGD or AdamW"),
    "other hosts": ({}, ("--controller", "specialist"), "name 3 places in slots=[...]"),
    "a rate that is no number": ({}, ("--lr", "nan"), "given: nan; valid: a number above 0"),
    "a card too many": ({}, ("--device", "cuda:99"), "There is no such device; given: cuda:99"),
    "unknown device": ({}, ("--device", "gpu"), "There is no such device; given: gpu"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_wrong_words_get_one_sentence(case: str, home: Path) -> None:
    places, words, said = CASES[case]
    assert said in refused(grow(home, *words, **places))
    assert not (home / "out" / "checkpoint").exists()


AUDITS = {
    "typo in the class": (("--epochs", "1"), "did you mean 'Slow'?", "net.py:Slw"),
    "no epochs": (("--epochs", "0"), "An audit takes epochs and time", "net.py:Slow"),
    "no time": (("--seconds", "1e-9"), "There is no time for an audit", "net.py:Slow"),
    "no room": (("--budget.params", "3"), "The budget has no room", "net.py:Slow"),
    "no such folder": (("--json", "nowhere/audit.json"), "cannot be written", "net.py:Slow"),
    "fails in the middle": (
        ("--budget.params", "+60%"), "Training fails; given: RuntimeError", "net.py:Late"),
}  # fmt: skip


@pytest.mark.parametrize("case", AUDITS)
def test_an_audit_that_cannot_be_made_says_why(case: str, home: Path) -> None:
    words, said, model = AUDITS[case]
    usual = ["audit", f"{home}/{model}", "--data", f"{home}/table.npz", "--quiet"]
    assert said in refused([*usual, *words])


def test_a_directory_with_something_in_it_is_not_written_to(home: Path) -> None:
    assert "name another directory" in refused(grow(home, "--out", str(home / "full")))
    assert [file.name for file in (home / "full").iterdir()] == ["diary.txt"]
    assert "is not empty" in refused(grow(home, "--out", str(home / "notes.txt")))


def test_code_that_fails_in_the_middle_is_told_from_wrong_words(home: Path) -> None:
    run = home / "failed"
    said = refused(grow(home, "--out", str(run), model="net.py:Late"))
    assert "Training fails; given: RuntimeError: too small" in said
    assert f"go on with: esper resume {run}" in said
    assert "raise RuntimeError" in (run / "failure.txt").read_text(encoding="utf-8")


def test_several_processes_are_for_scripts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    said = refused(grow(home, "--out", str(home / "many")))
    assert "in one process; run a script of yours under torchrun" in said


def test_a_precision_that_does_not_exist_is_refused_with_those_that_do(home: Path) -> None:
    told = esper(*grow(home, "--precision", "fp16"))
    assert told.returncode == 2
    assert "bf16" in told.stdout + told.stderr
    assert "Traceback" not in told.stderr


def test_there_are_enough_of_them() -> None:
    from tests.api.test_wrong_usage import WRONG

    assert len({*CASES, *WRONG}) >= 200


def test_options_that_do_not_exist_or_are_missing_are_named(home: Path) -> None:
    told = esper("grow", f"{home}/net.py:Slow", "--data", "digits", "--epoch", "3")
    assert told.returncode == 2
    assert "--budget.epochs" in told.stdout + told.stderr
    assert "Traceback" not in told.stderr
    told = esper("grow", f"{home}/net.py:Slow")
    assert told.returncode == 2
    assert "--data" in told.stdout + told.stderr
    assert "Traceback" not in told.stderr


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(home: Path) -> Path:
    """A run as an interruption leaves it: whole, and not finished."""
    run = home / "stopped"
    words = grow(home, "--budget.epochs", "3", "--out", str(run))

    from esper.show.progress import GrowthProgress

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    patch = pytest.MonkeyPatch()
    patch.setattr(GrowthProgress, "__call__", interrupt)
    told = esper_here(*words)
    patch.undo()
    assert told.returncode == 130
    assert f"Go on with: esper resume {run}" in told.stderr
    return run


def test_what_is_not_a_run_is_not_exported(home: Path, tmp_path: Path) -> None:
    assert "is not a run of esper grow; given: no such directory" in refused(["export", "nowhere"])
    assert "no checkpoint/manifest.json in it" in refused(["export", home / "full"])
    assert "is not a run of esper grow" in refused(["export", tiny_run(tmp_path / "run").path])
    assert "is not a run" in refused(["resume", home / "full"])


def test_an_unfinished_run_is_not_exported(stopped: Path) -> None:
    said = refused(["export", stopped])
    assert f"epoch 1 of 3; go on with: esper resume {stopped}" in said


def test_saved_run_on_removed_data_set_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = home / "removed_data_set"
    words = grow(home, "--budget.epochs", "3", "--out", str(run), data="mnist")
    pair = (torch.randn(40, 6), torch.randint(4, (40,)))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # Save a run as earlier versions did, when the data set was built in.
    with monkeypatch.context() as patch:
        patch.setattr("esper.show.progress.GrowthProgress.__call__", interrupt)
        patch.setattr(
            "esper.karn.grow_commands.load_data", lambda *_, **__: {"train": pair, "val": pair}
        )
        assert esper_here(*words).returncode == 130

    message = refused(["resume", run])
    assert "Reading IDX files was removed in 0.2.0, and with it the data set 'mnist'" in message
    assert "built-in data sets digits, mnist1d, stdlib" in message
    assert "name FILE.py:FUNCTION" in message


def test_a_format_that_does_not_exist_is_refused(stopped: Path) -> None:
    assert "did you mean 'onnx'?" in refused(["export", stopped, "--format", "onx"])


def test_a_run_does_not_go_on_with_another_model(stopped: Path, home: Path) -> None:
    before = (stopped / "checkpoint" / "manifest.json").read_bytes()
    said = refused(["resume", stopped, "--model", f"{home}/net.py:Other"])
    assert "head.weight" in said or "model" in said
    assert (stopped / "checkpoint" / "manifest.json").read_bytes() == before


def test_a_run_does_not_go_on_with_other_data(stopped: Path, home: Path) -> None:
    said = refused(["resume", stopped, "--data", f"{home}/other.npz"])
    assert "data" in said


def test_a_model_that_is_no_longer_there_is_asked_for(
    stopped: Path, home: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    (home / "net.py").rename(home / "moved.py")
    try:
        said = refused(["resume", run])
        assert "say where it is with --model FILE.py:NAME" in said
    finally:
        (home / "moved.py").rename(home / "net.py")


def test_a_damaged_checkpoint_is_refused(stopped: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    for tensors in run.glob("checkpoint*/tensors-*"):
        content = bytearray(tensors.read_bytes())
        content[-1] ^= 1
        tensors.write_bytes(content)
    assert "is damaged" in refused(["resume", run])
    assert "is damaged" in refused(["export", run])


def test_a_run_of_a_program_is_left_to_the_program(stopped: Path, tmp_path: Path) -> None:
    from esper.api.grown_runs import KIND, VERSION, GrowthFolder
    from esper.archive import write_archive

    run = tmp_path / "run"
    archive = GrowthFolder(stopped).checkpoint()
    notes = json.loads(json.dumps(archive.notes))
    notes["settings"]["origin"] = None
    write_archive(
        run / "checkpoint", kind=KIND, version=VERSION, tensors=archive.tensors, notes=notes
    )
    assert "use esper.resume(" in refused(["resume", run])


def test_a_folder_that_does_not_exist_is_named(stopped: Path, home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    assert esper_here("resume", run).returncode == 0
    said = refused(["export", run, "--format", "pt2", "--out", home / "no" / "net.pt2"])
    assert "There is no such folder" in said
    said = refused(["export", run, "--out", home / "no" / "net"])
    assert "There is no such folder" in said
    said = refused(["export", run, "--format", "pt2", "--out", home / "notes.txt"])
    assert "must end in .pt2; given: notes.txt" in said
    assert (home / "notes.txt").read_text(encoding="utf-8") == "no code"
    assert "is a folder; name a file" in refused(["export", run, "--format", "pt2", "--out", home])
