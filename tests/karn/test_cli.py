"""The command line as a stranger meets it."""

import importlib
import inspect
import typing

import pytest

from esper.karn.commands import Command, OfRun, OfSuite
from tests.programs import COMMAND_LINE, esper, run


def test_life_tells_a_whole_life_and_ends_with_its_figures() -> None:
    short = "from esper.garden import episodes; episodes.GARDEN_BATCHES = 4\n"
    told = run(short + COMMAND_LINE, "life", "--epochs", "16", "--samples", "1000")
    assert told.returncode == 0, told.stderr
    for stage in ("TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "PRUNED", "EMBARGOED"):
        assert f"→ {stage}" in told.stdout
    assert "RESETTING → DORMANT" in told.stdout.replace("\n", " ")
    assert "ended FOSSILIZED" in told.stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("blueprints", "--host", "cnov1d"), "did you mean 'conv1d'?"),
        (("life", "--epochs", "3"), "at least 16 epochs"),
        (("life", "--samples", "0"), "at least 16 epochs and 50 samples"),
    ],
)
def test_wrong_values_get_one_sentence_and_no_traceback(words: tuple[str, ...], said: str) -> None:
    result = esper(*words)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_an_unknown_option_is_refused_with_the_one_that_was_meant() -> None:
    result = esper("life", "--epoch", "3")
    assert result.returncode == 2
    assert "--epochs" in result.stderr + result.stdout


def test_blueprints_lists_every_blueprint_with_its_cost() -> None:
    from esper.kasmina import blueprint_names

    listed = esper("blueprints", "--host", "mlp")
    assert listed.returncode == 0
    assert all(name in listed.stdout for name in blueprint_names("dense"))


def test_version_is_the_packages() -> None:
    import esper as package

    assert esper("version").stdout.strip() == f"esper {package.__version__}"


@pytest.mark.parametrize(
    "command", Command.__subclasses__() + OfRun.__subclasses__() + OfSuite.__subclasses__()
)
def test_what_a_command_does_is_a_function_that_takes_the_command(command: type[Command]) -> None:
    for work in (getattr(command, "does", ""), getattr(command, "does_of_growth", "")):
        module, _, function = work.partition(".")
        if function:
            done = getattr(importlib.import_module(f"esper.karn.{module}"), function)
            (taken,) = inspect.signature(done).parameters.values()
            assert command in (typing.get_args(taken.annotation) or (taken.annotation,))
