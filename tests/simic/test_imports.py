"""What importing the learner costs, and what it does without."""

import subprocess
import sys

import pytest


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("package", ["esper.tamiyo", "esper.simic", "esper.simic.agent"])
def test_importing_a_package_does_not_import_torch(package: str) -> None:
    assert run(f"import sys, {package}; print('torch' in sys.modules)") == "False"


@pytest.mark.slow
def test_the_learner_needs_neither_gymnasium_nor_the_command_line() -> None:
    program = (
        "import sys\n"
        "for name in ('gymnasium', 'tyro', 'rich'): sys.modules[name] = None\n"
        "from esper.simic.agent import *\n"
        "from esper.tamiyo import *\n"
        "agent = PPOAgent.build(independent_heads((2,)), 3, 2, 4)\n"
        "print(agent.buffer.steps)"
    )
    assert run(program) == "4"
