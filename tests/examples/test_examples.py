"""The examples run, in short versions, and do what they say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES = 80


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
def test_a_table_is_learned_and_the_report_told(capsys: pytest.CaptureFixture[str]) -> None:
    run = example("table_mlp").main(epochs=9, rows=800)
    assert run.finished
    report = run.report()
    assert report.within_budget
    assert report.after["score"] > report.before["score"] + 10
    assert size(run.export()) == report.host_params + report.added
    assert f"{size(run.export()):,} parameters in the exported" in capsys.readouterr().out


@pytest.mark.slow
def test_digits_are_interrupted_resumed_and_written(tmp_path: Path) -> None:
    run = example("digits_cnn").main(tmp_path, epochs=8, samples=300)
    assert run.finished
    assert len(run.history) == 8
    assert (tmp_path / "digits" / "model.py").is_file()


def test_a_gpt_learns_in_a_loop_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    losses = example("stdlib_gpt").main(epochs=6, steps=6)
    assert losses[-1] < losses[0] < 5.6
    assert "exported: 31," in capsys.readouterr().out


def test_skips_and_shared_weights_survive_growing(capsys: pytest.CaptureFixture[str]) -> None:
    module = example("skips_and_sharing")
    plain = module.main(epochs=8, batches=8)
    assert isinstance(plain, module.Denoiser)
    assert plain(torch.zeros(3, 32)).shape == (3, 32)
    assert "taken by slots" in capsys.readouterr().out


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.name)
def test_an_example_is_short_and_says_how_to_run_it(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES
    assert f"python examples/{file.name}" in text
