"""What importing the senses costs: a reader starts without torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "program",
    [
        "import esper.nissa",
        "from esper.nissa import RunReader",
        "from esper.nissa import Hub, RunStore, Decisions, AnomalyDetector, TensorBoardSink",
    ],
)
def test_torch_is_not_imported_by(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}\nprint('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
