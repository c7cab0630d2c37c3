"""Settings for every test: one thread, and no per-example deadline on shared machines.

`make quick` leaves out what is marked slow: single tests, and the modules that are listed here.
"""

import gc
import os
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
# What is kept is written through to the disk, thousands of times: in memory nobody waits for it.
SHARED = Path("/dev/shm")  # noqa: S108 - pytest makes a folder of its own in it
if SHARED.is_dir():
    found = os.statvfs(SHARED)
    if found.f_bavail * found.f_frsize > 2**31 and not found.f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(SHARED))
MEMORY = tempfile.TemporaryDirectory(prefix="esper-tests-")  # of code that tests start runs with
os.environ["XDG_STATE_HOME"] = MEMORY.name
hypothesis.settings.register_profile("esper", deadline=None, print_blob=True)
hypothesis.settings.load_profile("esper")

TESTS = Path(__file__).parent
# Up to half a minute a test; they come first, so that neither process ends with one of them.
LONGEST = (
    "test_alignment.py",
    "test_docs.py",
    "test_kill.py",
    "test_learning.py",
    "test_learning_study.py",
)
# They train, export or go through many cases: together most of the time that all tests take.
SLOW_MODULES = {
    TESTS / folder / f"test_{name}.py"
    for folder, names in {
        "api": (
            "auditing",
            "distributed",
            "grow_loop",
            "grow_telemetry",
            "models_of_people",
            "resuming",
            "shadows",
            "sixty_modules",
            "tryouts",
        ),
        "benchmarks": ("growing",),
        "faults": ("data_and_exports", "folders", "looking", "not_finite", "telemetry"),
        "garden": ("atlas", "environment", "evaluation"),
        "integrations": ("lightning", "processes", "transformers"),
        "karn": ("growing_cli",),
        "kasmina": (
            "blueprints",
            "causality",
            "plain_module",
            "program_export",
            "python_export",
            "seed_properties",
            "state_machine",
            "wrapping",
            "wrapping_compile",
            "wrapping_state",
        ),
        "nissa": ("trackers",),
        "show": ("report",),
        "simic": ("imports", "ppo", "processes", "waiting"),
        "simic/gym": ("gym_imports", "training"),
        "simic/training": ("evaluator", "greenhouse_trainer", "renamed_settings", "trainer"),
        "studies": (
            "cohort",
            "greenhouse",
            "growth_study",
            "learning_parts",
            "learning_study",
            "studies_report",
            "transfer",
            "waiting",
        ),
        "tamiyo": ("controllers",),
        "tolaria": ("governor", "population", "population_snapshots", "shadow_rows"),
        "tree": ("site", "wheel"),
        "watch": ("in_browser",),
    }.items()
    for name in names
}


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path in SLOW_MODULES:
            item.add_marker(pytest.mark.slow)
    # The long ones first, so that no process waits at the end while another is in one of them.
    items.sort(
        key=lambda item: (
            item.path.name not in LONGEST,
            item.get_closest_marker("slow") is None,
        )
    )


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: looking for garbage among them is a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
