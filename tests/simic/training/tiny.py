"""A run so small that it can be killed a hundred times, and what must not depend on that."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from esper.archive.tensors import MANIFEST
from esper.garden import Context, Source, Suite, save_suite
from esper.nissa import RunReader
from esper.simic.agent import PPOConfig
from esper.simic.training import EvaluationConfig, RunFolder, TrainConfig

HORIZON, ENVS, ROUNDS = 6, 4, 4
BATCHES = 4  # of an epoch, where a test does not want the usual ones
SUITE = Suite(
    name="tiny",
    training=tuple(
        Context(
            name=family,
            family=family,
            host="mlp",
            host_sizes=(("width", 8),),
            source=Source(family=family, samples=200),
        )
        for family in ("fixed", "xor")
    ),
)
TINY = TrainConfig(
    rounds=ROUNDS,
    envs=ENVS,
    horizon=HORIZON,
    seeds_per_context=1,
    lstm=16,
    checkpoint_every=1,
    ppo=PPOConfig(epochs=2, minibatches=2, lr=1e-2),
    evaluation=EvaluationConfig(every=2, seeds=1, baselines=("random",)),
)
FACTS = {"suite": SUITE.to_dict()}

TOLD = (
    "decisions", "steps", "lifecycle", "episodes", "rollbacks", "updates", "evaluations",
    "attributions",
)  # fmt: skip


def tiny_run(path: Path, **changes: Any) -> RunFolder:
    """A new run; its directory holds everything it needs."""
    return RunFolder.create(path, replace(TINY, **changes), FACTS)


def tiny_files(folder: Path, **changes: Any) -> Path:
    """The settings of a tiny run as a file, for the command line; its suite lies beside it."""
    from esper.simic.training import to_toml

    save_suite(SUITE, folder / "tiny.toml")
    config = replace(TINY, suite=str(folder / "tiny.toml"), **changes)
    file = folder / "settings.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    return file


def kept(run: RunFolder) -> dict[str, str]:
    """Hashes of all that checkpoints and the best agent hold; manifests hold those of tensors."""
    found = [*(run.path / "checkpoints").rglob(MANIFEST), *run.best.rglob(MANIFEST)]
    return {
        str(file.parent.relative_to(run.path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(found)
    }


def told(run: RunFolder) -> dict[str, list[tuple[Any, ...]]]:
    """Rows of everything that must be the same in every run, in an order of their own."""
    rows: dict[str, list[tuple[Any, ...]]] = {}
    with RunReader(run.path) as reader:
        for table in TOLD:
            columns = sorted(
                name
                for (name,) in reader.query(f"select name from pragma_table_info('{table}')").rows  # noqa: S608
                if name != "event"
            )
            listed = ", ".join(f'"{name}"' for name in columns)
            found = reader.query(f"select {listed} from {table} where 1")  # noqa: S608
            skip = columns.index("name") if table == "updates" else None
            rows[table] = sorted(
                (row for row in found.rows if skip is None or row[skip] != "peak_memory_bytes"),
                key=repr,
            )
    return rows


def digest(run: RunFolder) -> str:
    with RunReader(run.path) as reader:
        return reader.digest()


def assert_same(run: RunFolder, reference: RunFolder) -> None:
    """To the bit: weights, optimiser, random streams, metrics, decisions, rewards, episodes."""
    assert kept(run) == kept(reference)
    ours, theirs = told(run), told(reference)
    for table in TOLD:
        assert ours[table] == theirs[table], table
