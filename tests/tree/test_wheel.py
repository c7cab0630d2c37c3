"""The built wheel is the whole program: it works where the repository is not.

It is installed into a new environment that has nothing of its own but a path to the dependencies.
The file that makes this checkout importable there is not read, so what runs is the wheel.
"""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
"""
SUITE = """
name = "small"
training = [
    { name = "few", family = "mnist1d", source = { family = "mnist1d", samples = 200 } },
]
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    package = {name.removeprefix("src/") for name in tracked if (ROOT / name).is_file()}
    assert {"esper/py.typed", "esper/tamiyo/data/tamiyo/manifest.json"} <= package
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == package


@pytest.fixture(scope="module")
def home(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the new environment and a user's two files."""
    home = tmp_path_factory.mktemp("elsewhere")
    venv.create(home / "env", with_pip=False)
    python = home / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    subprocess.run([*install, "--no-index", "--no-compile", str(wheel)], check=True)
    (packages,) = (home / "env").glob("lib/python*/site-packages")
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "dependencies.pth").write_text("\n".join(borrowed), encoding="utf-8")
    (home / "net.py").write_text(MODEL, encoding="utf-8")
    (home / "small.toml").write_text(SUITE, encoding="utf-8")
    return home


def run_installed(home: Path, program: str, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [home / "env" / "bin" / program, *words],
        cwd=home, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_new_environment_does_not_see_the_repository(home: Path) -> None:
    paths = run_installed(
        home, "python", "-c", "import esper, sys; print(esper.__file__, *sys.path)"
    )
    esper_file, *path = paths.split()
    assert Path(esper_file).is_relative_to(home / "env")
    assert str(ROOT / "src") not in path
    assert str(ROOT) not in path


def test_the_installed_program_lets_a_network_grow(home: Path) -> None:
    words = "grow net.py:Net --data digits --flat --samples 200 --budget.epochs 6"
    assert "the budget" in run_installed(home, "esper", *words.split())


# What else has data of its own in the wheel, in one interpreter.
COMMANDS = """
import sys
from esper.garden import episodes
from esper.karn.cli import main

episodes.GARDEN_BATCHES = 4
for words in sys.argv[1:]:
    sys.argv = ["esper", *words.split()]
    main()
"""


def test_installed_program_reads_shipped_atlas_and_controller(home: Path) -> None:
    tasks = "tasks --suite garden"
    evaluation = "evaluate --suite small.toml --controllers tamiyo --seeds 1 --quiet"
    output = run_installed(home, "python", "-c", COMMANDS, tasks, evaluation)
    contexts, _, standings = output.partition("small, training contexts")
    assert "best known" in contexts
    assert "tamiyo" in standings
