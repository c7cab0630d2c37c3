"""What importing the learner loads, and what the learner does without."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PUBLIC_NAMES = (
    "PPOAgent",
    "TamiyoRolloutBuffer",
    "compute_per_head_advantages",
    "signals_to_features",
    "AnomalyDetector",
)


def run_program(program: str) -> str:
    """Run a Python program in another process and return its output."""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@pytest.mark.parametrize(
    "package", ["esper.tamiyo", "esper.simic", "esper.simic.agent", "esper.distributed"]
)
def test_importing_a_package_does_not_import_torch(package: str) -> None:
    assert run_program(f"import sys, {package}; print('torch' in sys.modules)") == "False"


def test_simic_exports_the_prescribed_names() -> None:
    names = ", ".join(PUBLIC_NAMES)
    program = f"from esper.simic import {names}\nprint(*(x.__name__ for x in ({names})))"
    assert run_program(program).split() == list(PUBLIC_NAMES)


def test_learner_needs_neither_gymnasium_nor_command_line() -> None:
    program = (
        "import sys\n"
        "for name in ('gymnasium', 'tyro', 'rich'): sys.modules[name] = None\n"
        "from esper.simic.agent import *\n"
        "from esper.tamiyo import *\n"
        "space = independent_heads((2,))\n"
        "agent = PPOAgent(space, state_dim=3, num_envs=2, max_steps_per_env=4)\n"
        "print(agent.buffer.max_steps_per_env)"
    )
    assert run_program(program) == "4"


@pytest.mark.parametrize("package", ["simic", "tamiyo"])
def test_package_calls_no_private_function_of_torch(package: str) -> None:
    """`torch._dynamo` is the only way to name a compiled module and an unknown backend."""
    source = Path(__file__).parents[2] / "src" / "esper" / package
    private_uses = []
    for path in sorted(source.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"torch\._(?!_|dynamo)", line):
                private_uses.append(f"{path.relative_to(source)}:{number}: {line.strip()}")
    assert private_uses == []
