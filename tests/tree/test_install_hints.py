"""Messages about optional dependencies: one wording, real extras, and a command that works."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from esper.leyline.errors import Extra, install_hint
from tests.programs import COMMAND_LINE, ENVIRONMENT

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
ERRORS = ROOT / "src" / "esper" / "leyline" / "errors.py"
AUDIT = ["audit", "net.py:Net", "--data", "digits", "--out", "audit"]
FOLDERS = ("src", "studies", "benchmarks", "docs", "tests")


def string_literals(file: Path) -> list[str]:
    """Return every string literal of a Python file, f-strings piece by piece."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [node.value for node in nodes if isinstance(node.value, str)]


def test_install_hint_names_checkout_and_extra() -> None:
    hint = install_hint("watch")
    assert hint == "install it from Esper's checkout: pip install '.[watch]'"


def test_extras_of_messages_are_declared_in_pyproject() -> None:
    assert set(get_args(Extra)) <= set(EXTRAS)


def test_source_has_no_other_install_command() -> None:
    files = [file for folder in ("src", "studies") for file in (ROOT / folder).rglob("*.py")]
    assert ERRORS in files
    offenders = [
        str(file.relative_to(ROOT))
        for file in files
        if file != ERRORS and any("pip install" in text for text in string_literals(file))
    ]
    assert not offenders, "use esper.leyline.errors.install_hint"


def test_texts_do_not_install_esper_from_an_index() -> None:
    files = list(ROOT.glob("*.md"))
    for folder in FOLDERS:
        for pattern in ("*.py", "*.md", "*.toml"):
            files += (ROOT / folder).rglob(pattern)
    # Split, so that this file does not match.
    index_install = re.compile(r"pip install [^\n]*esper-" + r"ml|esper-" + r"ml\[")
    offenders = [
        str(file.relative_to(ROOT))
        for file in files
        if index_install.search(file.read_text(encoding="utf-8"))
    ]
    assert not offenders


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["demo"], ["audit", "net.py:Net", "--data", "digits", "--out", "a"]]
)
def test_commands_without_matplotlib_stop_before_their_work(
    words: list[str], tmp_path: Path
) -> None:
    program = f"import sys\nsys.modules['matplotlib'] = None\n{COMMAND_LINE}"
    result = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.endswith(
        f"matplotlib, which is not installed; {install_hint('report')}.\n"
    )
    assert result.stdout == ""
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_watch_without_server_package_prints_install_hint(package: str, tmp_path: Path) -> None:
    # A new interpreter, in which the import system reports the package as not installed.
    program = f"import sys\nsys.modules[{package!r}] = None\n{COMMAND_LINE}"
    result = subprocess.run(
        [sys.executable, "-c", program, "watch", os.fspath(tmp_path)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr == (
        f"esper: The live page needs a server; given: no {package}; {install_hint('watch')}.\n"
    )
