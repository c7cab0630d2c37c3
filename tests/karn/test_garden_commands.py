"""The garden's commands: a small evaluation from end to end, and wrong words of every kind."""

import json
from pathlib import Path

import pytest
import torch

from esper.garden import Atlas, Context, Source, Suite, save_suite
from esper.tamiyo.controllers import Arm
from tests.karn.own_files import refused
from tests.programs import esper_here
from tests.ranks import ESPER, torchrun

CONTEXT = Context(
    name="few", family="mnist1d", source=Source(family="mnist1d", samples=200), host="mlp"
)


@pytest.fixture
def own_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A suite of one context, with short epochs."""
    monkeypatch.setattr("esper.garden.episodes.GARDEN_BATCHES", 2)
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "own.toml"
    save_suite(Suite(name="own", training=(CONTEXT,)), path)
    return str(path)


def test_tasks_lists_every_context_of_a_suite(own_suite: str) -> None:
    told = esper_here("tasks", "--suite", own_suite)
    assert told.returncode == 0
    assert "few" in told.stdout
    assert "mnist1d × 200" in told.stdout
    assert "esper atlas --suite" in told.stdout.replace("\n", " ")


@pytest.mark.slow
def test_a_small_evaluation_from_end_to_end(own_suite: str, tmp_path: Path) -> None:
    arm = "fixed:slot=early,blueprint=convpool,epoch=4"
    words = ["evaluate", "--suite", own_suite, "--controllers", "never", "random", arm]
    words += ["--seeds", "2", "--out", str(tmp_path / "r.jsonl"), "--json", str(tmp_path / "f")]
    told = esper_here(*words)
    assert told.returncode == 0
    assert "own, training contexts; rent 2" in told.stdout
    assert "episodes: 8 of 8" in told.stderr, "two controls, and two episodes of each"
    figures = json.loads((tmp_path / "f").read_text())
    assert figures["never.gain"] == pytest.approx(0.0, abs=1.0)
    assert figures["random.episodes"] == 2
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 3 * 2
    assert json.loads(lines[-1])["seeds"] == 1, "the schedule made its seed permanent"
    again = esper_here(*words, "--quiet")
    assert again.returncode == 0
    assert again.stderr == "", "nothing is played twice, and quiet is quiet"
    assert again.stdout == told.stdout


@pytest.mark.slow
def test_two_ranks_find_what_one_finds_to_the_byte(own_suite: str, tmp_path: Path) -> None:
    words = ("evaluate", "--controllers", "random", "--rows", "1", "--out", "out")
    found = []
    for size in (1, 2):
        (folder := tmp_path / str(size)).mkdir()
        given = (*words, "--suite", own_suite, "--seeds", "2", "--json", "figures")
        done = torchrun(size, ESPER, *given, cwd=folder)
        assert done.returncode == 0, done.stderr
        files = [each for each in folder.rglob("*") if each.is_file() and each.suffix != ".sqlite"]
        told = {str(file.relative_to(folder)): file.read_bytes() for file in files}
        found.append(told | {"said": done.stdout.encode()})
    assert found[0] == found[1]
    assert len(found[0]) > 2


def test_a_stored_atlas_is_shown(own_suite: str, tmp_path: Path) -> None:
    arms = tuple(Arm(slot=slot, blueprint="mlp", epoch=4) for slot in ("early", "late"))
    gain = torch.tensor([[[8.0] * 4, [2.0] * 4]], dtype=torch.float64)
    control = torch.full((1, 4), 40.0, dtype=torch.float64)
    stored = tmp_path / "stored"
    nothing = torch.zeros_like(gain)
    Atlas((CONTEXT,), arms, control, control, gain, gain, nothing).save(stored)
    words = ["atlas", "--suite", own_suite, "--show", "--out", str(stored)]
    told = esper_here(*words, "--json", tmp_path / "f.json")
    assert told.returncode == 0
    assert "40.0" in told.stdout
    assert "early/mlp" in told.stdout
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["best_constant_share"] == pytest.approx(1.0)
    assert figures["random_share"] == pytest.approx((8 + 2) / 2 / 8)
    assert figures["wait_optimal_share"] == 0.0


FIXED = "fixed:slot=early,blueprint=mlp"
WRONG = [
    (("tasks", "--suite", "gardn"), "did you mean 'garden'?"),
    (("tasks", "--suite", "none.toml"), "There is no such suite file"),
    (("tasks", "--suite", "torn.toml"), "is not TOML"),
    (("tasks", "--suite", "removed.toml"), "training context 'a': Reading IDX files was removed"),
    (("tasks", "--suite", "wrong.toml"), "training context 'a': Unknown family of data"),
    (("evaluate", "--suite", "nope"), "Unknown suite"),
    (("evaluate", "--group", "lesions"), "did you mean 'lesion'?"),
    (("evaluate", "--controllers", "nevr"), "did you mean 'never'?"),
    (("evaluate", "--controllers", "never", "never"), "different names"),
    (("evaluate", "--controllers", f"{FIXED}p,epoch=5"), "Unknown blueprint"),
    (("evaluate", "--controllers", f"{FIXED},epoch=40"), "epoch 40 of 25"),
    (("evaluate", "--controllers", "fixed:slot=first,blueprint=mlp"), "Unknown slot"),
    (("evaluate", "--controllers", f"{FIXED},epoch=soon"), "a whole number"),
    (("evaluate", "--seeds", "0"), "at least 1"),
    (("evaluate", "--rows", "0"), "given: 0"),
    (("evaluate", "--rent", "-1"), "from 0"),
    (("evaluate", "--device", "tpu"), "valid: cpu, cuda"),
    (("evaluate", "--out", "."), "cannot be kept"),
    (("evaluate", "--suite", "own.toml", "--controllers", "oracle"), "needs an atlas"),
    (("atlas", "--suite", "nope", "--show"), "Unknown suite"),
    (("atlas", "--suite", "own.toml", "--show"), "No atlas of suite 'own' is shipped"),
    (("atlas", "--suite", "own.toml", "--show", "--out", "none"), "no such directory"),
    (("atlas", "--suite", "own.toml", "--epochs", "40"), "epoch 40 of 25"),
    (("atlas", "--suite", "own.toml", "--epochs", "0"), "from epoch 3"),
    (("atlas", "--suite", "own.toml", "--seeds", "1"), "at least 2 seeds"),
    (("atlas", "--suite", "own.toml", "--rows", "0"), "given: 0"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=lambda value: " ".join(value)[:60])
def test_wrong_words_get_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    own_suite: str,
    tmp_path: Path,
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("torn.toml").write_text('name = "x"\n[[training]\n')
    for name, family in (("wrong", "nnist1d"), ("removed", "mnist")):
        context = f'name = "a"\nfamily = "f"\nsource = {{ family = "{family}" }}\n'
        Path(f"{name}.toml").write_text(f'name = "x"\n[[training]]\n{context}')
    assert said in refused(words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["evaluate", "atlas"])
def test_a_missing_gpu_is_said_in_one_sentence(command: str) -> None:
    said = refused([command, "--device", "cuda"])
    assert said.startswith("esper: There is no CUDA device; given: --device")
