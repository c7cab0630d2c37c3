"""The public names and the command line's options, as lists that a person reviews.

Run this file to write both lists anew; the diff is what the reviewer looks at.
"""

import contextlib
import importlib
import io
import os
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import esper
from esper.karn.cli import main

PUBLIC_NAMES = Path(__file__).with_name("public_names.txt")
CLI_OPTIONS = Path(__file__).with_name("cli_options.txt")


def packages() -> list[ModuleType]:
    """Return `esper` and every package inside it."""
    inside = pkgutil.walk_packages(esper.__path__, "esper.")
    return [esper, *(importlib.import_module(found.name) for found in inside if found.ispkg)]


def public_names() -> list[str]:
    """Return `package.name` for every name that a package offers in its `__all__`."""
    return sorted(
        f"{package.__name__}.{name}"
        for package in packages()
        for name in getattr(package, "__all__", [])
    )


def cli_options(command: tuple[str, ...] = ()) -> list[str]:
    """Return `esper … --option` for every option of `command` and of its subcommands."""
    text = help_text(command)
    # Options begin a line, or stand at the left border of a box; subcommands are bulleted. A
    # description, which may also mention options, is set apart by two spaces.
    left_columns = re.findall(r"^(?:│ )?(-.*?)(?:  |│)", text, flags=re.MULTILINE)
    options = [option for column in left_columns for option in re.findall(r"--[\w.-]+", column)]
    found = [" ".join(("esper", *command, option)) for option in options]
    for subcommand in re.findall(r"^│ +• (\S+)", text, flags=re.MULTILINE):
        found += cli_options((*command, subcommand))
    return sorted(found)


def help_text(command: tuple[str, ...]) -> str:
    """Return what `esper … --help` prints, without colours and in one column."""
    # A wider screen gets the boxes of a long help side by side, a narrower one broken names.
    plain = {"COLUMNS": "120", "NO_COLOR": "1"}
    words, said = ["esper", *command, "--help"], io.TextIOWrapper(io.BytesIO(), "utf-8")
    with (
        mock.patch.dict(os.environ, plain),
        mock.patch.object(sys, "argv", words),
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
    ):
        main()
    said.seek(0)
    return said.read()


def read(reviewed: Path) -> list[str]:
    """Return the entries of a reviewed list."""
    return reviewed.read_text(encoding="utf-8").split("\n")[:-1]


def write(reviewed: Path, entries: list[str]) -> None:
    """Replace the entries of a reviewed list."""
    reviewed.write_text("".join(f"{entry}\n" for entry in entries), encoding="utf-8")


if __name__ == "__main__":
    write(PUBLIC_NAMES, public_names())
    write(CLI_OPTIONS, cli_options())
