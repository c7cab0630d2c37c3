"""The shape of the repository: public names, command line options, import cost."""

import subprocess
import sys
from pathlib import Path

import pytest

import esper
from tests import conftest
from tests.tree import review

ROOT = Path(__file__).parents[2]


def test_the_package_under_test_is_the_one_in_this_checkout() -> None:
    home = Path(esper.__file__)
    assert home.is_relative_to(ROOT), (
        f"esper comes from {home}: this .venv belongs to another checkout; "
        "run `make clean` and `make test`"
    )


def test_every_module_that_is_listed_as_slow_exists() -> None:
    assert not [path for path in conftest.SLOW_MODULES if not path.is_file()]


def assert_reviewed(found: list[str], reviewed_list: Path) -> None:
    reviewed = review.read(reviewed_list)
    added = [entry for entry in found if entry not in reviewed]
    gone = [entry for entry in reviewed if entry not in found]
    assert found == reviewed, (
        f"{reviewed_list.relative_to(ROOT)} is out of date: added {added}, gone {gone}. "
        "If that is meant, run `.venv/bin/python tests/tree/review.py` and commit the list."
    )


def test_the_public_names_are_the_reviewed_ones() -> None:
    assert_reviewed(review.public_names(), review.PUBLIC_NAMES)


def test_every_public_name_can_be_imported() -> None:
    missing = [
        f"{package.__name__}.{name}"
        for package in review.packages()
        for name in getattr(package, "__all__", [])
        if not hasattr(package, name)
    ]
    assert not missing


def test_the_command_line_options_are_the_reviewed_ones() -> None:
    assert_reviewed(review.cli_options(), review.CLI_OPTIONS)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("import esper", id="import esper"),
        pytest.param("from esper.karn.cli import main; main()", id="esper --help"),
    ],
)
def test_torch_is_not_imported_by(program: str) -> None:
    # --help leaves through SystemExit, so the answer is printed at exit.
    watched = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        f"{program}"
    )
    finished = subprocess.run(
        [sys.executable, "-c", watched, "--help"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.split()[-1] == "False", (
        f"`{program}` imports torch; `python -X importtime` shows which module does"
    )
