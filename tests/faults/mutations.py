"""Ten guards, each broken on purpose in a copy of the tree: the tests of faults must notice all.

python -m tests.faults.mutations
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mutation(NamedTuple):
    guard: str
    file: str  # below src/esper
    text: str
    broken: str
    tests: str


MUTATIONS = (
    Mutation(
        "seal", "archive/tensors.py", 'unchanged = document["seal"] == sealed(body)',
        "unchanged = True", "tests/archive/test_tensors.py -k edited",
    ),
    Mutation(
        "lock", "archive/run_folders.py",
        "if self._lock is not None and not _is_same_file(self.path / LOCK, self._lock):",
        "if False:",
        "tests/faults/test_folders.py -k no_longer_there",
    ),
    Mutation(
        "fsync order", "archive/files.py",
        "    sync(temporary)\n    os.replace(temporary, final)",
        "    os.replace(temporary, final)\n    sync(final)",
        "tests/faults/test_folders.py -k reached_the_disk",
    ),
    Mutation(
        "retry", "archive/tensors.py", "if seal is None or seal == seal_of(folder):", "if True:",
        "tests/faults/test_folders.py -k beside_a_writer",
    ),
    Mutation(
        "finite check", "simic/agent/update.py",
        'if broken := [name for name in nonfinite if numbers[f"nonfinite {name}"][0]]:',
        "if broken := []:",
        "tests/faults/test_not_finite.py -k reverted",
    ),
    Mutation(
        "escape", "leyline/errors.py", '    return "".join(each if each.isprintable()',
        '    return text\n    return "".join(each if each.isprintable()',
        "tests/faults/test_data_and_exports.py -k terminal",
    ),
    Mutation(
        "path check", "garden/own_code.py",
        "if Path(file).is_file() and _mark(file) not in known]", "if False]",
        "tests/faults/test_looking.py -k agreed_to",
    ),
    Mutation(
        "checksum", "kasmina/templates/model.txt", "if SHA256 not in (None, found):", "if False:",
        "tests/faults/test_data_and_exports.py -k changed_byte",
    ),
    Mutation(
        "rotation", "simic/training/training_runs.py",
        "MAX_CHECKPOINTS = 3 ", "MAX_CHECKPOINTS = 1 ",
        "tests/faults/test_folders.py -k checkpoint_before_a_damaged_one",
    ),
    Mutation(
        "umask", "archive/tensors.py", "    digest = hashlib.sha256(data).hexdigest()\n",
        "    digest = hashlib.sha256(data).hexdigest()\n    temporary.chmod(0o600)\n",
        "tests/faults/test_data_and_exports.py -k mask",
    ),
)  # fmt: skip


def noticed(mutation: Mutation) -> bool:
    """Do the tests fail on the broken guard? Without it they pass, as all tests do."""
    with tempfile.TemporaryDirectory(prefix="esper-mutation-") as folder:
        tree = Path(folder)
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, tree / name)
        shutil.copy(ROOT / "pyproject.toml", tree)
        file = tree / "src" / "esper" / mutation.file
        whole = file.read_text(encoding="utf-8")
        assert whole.count(mutation.text) == 1, f"{mutation.guard}: {mutation.file} has changed"
        file.write_text(whole.replace(mutation.text, mutation.broken), encoding="utf-8")
        words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutation.tests.split()]
        environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            [sys.executable, *words], cwd=tree, env=environment, capture_output=True, check=False
        )
        return ended.returncode == 1


def main() -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(noticed, MUTATIONS))
    for mutation, caught in zip(MUTATIONS, found, strict=True):
        print(f"{mutation.guard}: {'noticed' if caught else 'NOT NOTICED'}")
    sys.exit(not all(found))


if __name__ == "__main__":
    main()
