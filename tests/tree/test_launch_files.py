"""Files that start a run on a cluster can be read by what reads them."""

import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "docs" / "launch"


def test_the_script_for_slurm_is_one() -> None:
    script = LAUNCH / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True, timeout=120)
    text = script.read_text(encoding="utf-8")
    assert "#SBATCH --nodes=4" in text
    assert "-m esper resume" in text
    assert "Not run here" in text


def test_the_job_for_kubernetes_is_one() -> None:
    yaml = pytest.importorskip("yaml")
    text = (LAUNCH / "kubernetes.yaml").read_text(encoding="utf-8")
    job = yaml.safe_load(text)
    assert job["kind"] == "PyTorchJob"
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["command"][:1] == ["torchrun"]
    assert "Not run here" in text
