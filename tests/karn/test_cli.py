"""The command line as a stranger meets it."""

import importlib
import inspect
import re
import subprocess
import sys
import typing

import pytest

from esper import __version__
from esper.karn.commands import Command, OfRun, OfSuite
from tests.programs import COMMAND_LINE, esper
from tests.tree import review


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tasks", "--suite", "gardn"), "did you mean 'garden'?"),
        (("atlas", "--seeds", "1"), "at least 2 seeds"),
    ],
)
def test_wrong_values_get_one_sentence_and_no_traceback(words: tuple[str, ...], said: str) -> None:
    result = esper(*words)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_an_unknown_option_is_refused_with_the_one_that_was_meant() -> None:
    result = esper("evaluate", "--seed", "3")
    assert result.returncode == 2
    assert "--seeds" in result.stderr + result.stdout


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_version_option_prints_version_without_importing_torch(option: str) -> None:
    # A new interpreter, since the process that other tests fork from has imported torch.
    program = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        f"{COMMAND_LINE}"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, option], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0
    assert result.stdout == f"esper {__version__}\n"
    assert result.stderr == "False\n"


def test_help_mentions_version_options() -> None:
    result = esper("--help")
    assert result.returncode == 0
    assert "-V, --version  print the version and exit" in result.stdout


SECOND_WORDS = {line.split()[1] for line in review.read(review.CLI_OPTIONS)}
COMMANDS = sorted(word for word in SECOND_WORDS if not word.startswith("-"))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_no_comment_for_code_checkers(name: str) -> None:
    text = review.help_text((name,))
    assert "usage: esper" in text
    assert not re.search(r"type: ignore|noqa|fmt: ", text)


def test_help_of_train_explains_presets() -> None:
    assert "choose the preset that sets the defaults" in review.help_text(("train",))


@pytest.mark.parametrize("name", ["version", "life", "blueprints"])
def test_removed_command_is_refused_with_available_commands(name: str) -> None:
    result = esper(name)
    message = result.stdout + result.stderr
    assert result.returncode == 2
    assert f"Unrecognized options: {name}" in message
    assert "Available subcommands: demo, train" in message
    assert "esper --help" in message


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
