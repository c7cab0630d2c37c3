"""Imports of the learner for Gymnasium environments, each in a new interpreter."""

import subprocess
import sys

import pytest

from esper.leyline.errors import install_hint
from tests.programs import ENVIRONMENT


def run_program(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("package", ["esper.rl", "esper.simic.gym", "esper.simic"])
def test_package_import_loads_neither_torch_nor_gymnasium(package: str) -> None:
    program = f"import sys, {package}\nprint([{{'torch', 'gymnasium'}} & set(sys.modules)])"
    assert run_program(program) == "[set()]"


def test_train_without_gymnasium_raises_install_hint() -> None:
    program = (
        "import sys\n"
        "sys.modules['gymnasium'] = None\n"
        "from esper.leyline import EsperError\n"
        "try:\n"
        "    from esper.rl import train\n"
        "except EsperError as error:\n"
        "    print(error)\n"
    )
    assert run_program(program) == f"gymnasium is not installed; {install_hint('gym')}."
