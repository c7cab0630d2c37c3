"""Damaged and forged checkpoints: each is refused by name, none loads, nothing is executed.

The tests try three hundred; `make fault` tries five thousand.
"""

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from esper.archive import read_archive, write_archive
from esper.archive.tensors import MANIFEST, sealed
from esper.leyline.errors import EsperError
from esper.nissa import AnomalyDetector
from esper.simic.agent import PPOAgent
from esper.simic.agent.update import optimizer_tensors
from esper.simic.training import RunFolder, Trainer
from esper.simic.training.training_runs import STATE
from tests.simic.training.tiny import tiny_run

CASES = int(os.environ.get("ESPER_FUZZ", "300"))
ROUND = 2
MARK = "executed"


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with two checkpoints, the second of which is damaged again and again."""
    run = tiny_run(tmp_path_factory.mktemp("fuzz") / "run", rounds=2)
    trainer = Trainer(run)
    trainer.begin()
    trainer.train()
    trainer.close()
    assert run.rounds() == [0, 1, 2]
    return run


class Loader:
    """Reads a checkpoint as a run that goes on does, without the rest of the run."""

    def __init__(self, run: RunFolder) -> None:
        self.trainer = Trainer(run)

    def load(self, run: RunFolder) -> dict[str, Tensor]:
        """All tensors that were taken over."""
        self.trainer.run = run
        self.trainer.detector = AnomalyDetector()
        self.trainer.controls._validation.clear()
        self.trainer._restore(ROUND, run.read_checkpoint(ROUND))
        agent = self.trainer.agent
        weights = agent.network.state_dict()
        found = {f"network.{name}": tensor for name, tensor in weights.items()}
        optimizer_state = optimizer_tensors(agent.network, agent.optimizer)
        found |= {f"optimizer.{name}": tensor for name, tensor in optimizer_state.items()}
        found |= self.trainer.controls.state_dict()
        found["sampler"], found["shuffler"] = agent.sampler.get_state(), agent.shuffler.get_state()
        notes = {"best": self.trainer.best_score, "anomalies": self.trainer.detector.state_dict()}
        found["notes"] = torch.tensor(list(json.dumps(notes).encode()), dtype=torch.uint8)
        return {name: tensor.clone() for name, tensor in found.items()}


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def flip(folder: Path, draw: random.Random) -> None:
    """Bits of one file."""
    file = draw.choice(files_of(folder))
    data = bytearray(file.read_bytes())
    for _ in range(draw.choice((1, 1, 1, 8))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def cut(folder: Path, draw: random.Random) -> None:
    file = draw.choice(files_of(folder))
    data = file.read_bytes()
    file.write_bytes(data[: draw.randrange(len(data))])


def extend(folder: Path, draw: random.Random) -> None:
    file = draw.choice([file for file in files_of(folder) if file.name != MANIFEST])
    file.write_bytes(file.read_bytes() + draw.randbytes(draw.randint(1, 64)))


def delete(folder: Path, draw: random.Random) -> None:
    found = draw.choice([*files_of(folder), *(each for each in folder.iterdir())])
    shutil.rmtree(found) if found.is_dir() else found.unlink()


def swap_with_older(folder: Path, draw: random.Random) -> None:
    """A part, or one of its files, of the checkpoint before."""
    older = folder.with_name("round-000001")
    part = draw.choice((STATE, "agent-0"))
    if draw.random() < 0.5:
        shutil.rmtree(folder / part)
        shutil.copytree(older / part, folder / part)
        return
    name = draw.choice((MANIFEST, "tensors-*.safetensors"))
    (target,), (source,) = (folder / part).glob(name), (older / part).glob(name)
    shutil.copy(source, target)


def swap_parts(folder: Path, draw: random.Random) -> None:
    first, second = folder / STATE, folder / "agent-0"
    if draw.random() < 0.5:
        first.rename(folder / "x")
        second.rename(first)
        (folder / "x").rename(second)
        return
    one, two = draw.choice([(MANIFEST, MANIFEST), ("tensors-*",) * 2])
    (left,), (right,) = first.glob(one), second.glob(two)
    held = left.read_bytes()
    left.write_bytes(right.read_bytes())
    right.write_bytes(held)


def add_part(folder: Path, draw: random.Random) -> None:
    shutil.copytree(folder / "agent-0", folder / draw.choice(("agent-1", "other", ".agent-0")))


def replace_by_pickle(folder: Path, draw: random.Random) -> None:
    """What would make a file on being unpickled."""
    target = draw.choice(files_of(folder))

    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return os.mkdir, (str(folder.parents[2] / MARK),)

    torch.save(Bomb(), target)


def edit(folder: Path, draw: random.Random) -> None:
    """A value of a manifest, with its seal as it was."""
    file = draw.choice((folder / STATE, folder / "agent-0")) / MANIFEST
    document = json.loads(file.read_text(encoding="utf-8"))
    _change(document["body"], draw)
    file.write_text(json.dumps(document, indent=1), encoding="utf-8")


STRANGE = (
    None, True, -1, 0, 1, 3.5, 2**40, 10**30, "", "x", "nan", [], [1], [[]], {}, {"a": 1},
    float("nan"), float("inf"), "../../../etc/passwd",
)  # fmt: skip


def _change(body: Any, draw: random.Random) -> None:
    """Some value, anywhere inside."""
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            places.append((value, key))
            if isinstance(value[key], dict | list):
                visit(value[key])

    visit(body)
    holder, key = draw.choice(places)
    how = draw.random()
    if how < 0.25 and isinstance(holder, dict):
        del holder[key]
    elif how < 0.4 and isinstance(holder, dict):
        holder["unknown"] = draw.choice(STRANGE)
    else:
        holder[key] = draw.choice([value for value in STRANGE if repr(value) != repr(holder[key])])


def forge(folder: Path, draw: random.Random) -> None:
    """A value of a manifest, with all seals made anew: no accident, but no agent either."""
    part = draw.choice((STATE, "agent-0"))
    file = folder / part / MANIFEST
    document = json.loads(file.read_text(encoding="utf-8"))
    _change(document["body"], draw)
    document["seal"] = sealed(document["body"])
    file.write_text(json.dumps(document, indent=1), encoding="utf-8")
    if part != STATE:
        reseal(folder)


def forge_tensors(folder: Path, draw: random.Random) -> None:
    """Tensors of other names, shapes or types, with all seals made anew."""
    part = draw.choice((STATE, "agent-0"))
    manifest = json.loads((folder / part / MANIFEST).read_text(encoding="utf-8"))["body"]
    kind, version = manifest["kind"], manifest["version"]
    archive = read_archive(folder / part, kind=kind, version=version)
    tensors = dict(archive.tensors)
    name = draw.choice(sorted(tensors))
    how = draw.choice(("drop", "rename", "grow", "shrink", "type", "surplus", "kind", "version"))
    value = tensors[name]
    if how in ("drop", "rename"):
        del tensors[name]
    if how == "rename":
        tensors[draw.choice(("optimizer.0", "network.", "x", "controls.a", "hidden.x.y"))] = value
    if how == "surplus":
        tensors[draw.choice(("network.x", "optimizer.999.step", "controls.q.x", "z"))] = value
    if how == "grow":
        tensors[name] = torch.cat([value.reshape(-1), value.reshape(-1)[:1]])
    if how == "shrink":
        tensors[name] = value.reshape(-1)[:-1]
    if how == "type":
        tensors[name] = value.to(torch.float16 if value.dtype != torch.float16 else torch.int8)
    shutil.rmtree(folder / part)
    write_archive(
        folder / part,
        kind=kind if how != "kind" else draw.choice(("atlas", "", "ppo-agent2")),
        version=version if how != "version" else draw.choice((0, 2, 99)),
        tensors=tensors,
        notes=archive.notes,
    )
    if part != STATE:
        reseal(folder)


def reseal(folder: Path) -> None:
    """Make the state's list of parts agree with them."""
    import hashlib

    file = folder / STATE / MANIFEST
    document = json.loads(file.read_text(encoding="utf-8"))
    data = (folder / "agent-0" / MANIFEST).read_bytes()
    document["body"]["notes"]["parts"]["agent-0"] = hashlib.sha256(data).hexdigest()
    document["seal"] = sealed(document["body"])
    file.write_text(json.dumps(document, indent=1), encoding="utf-8")


DAMAGES = (
    flip, cut, extend, delete, swap_with_older, swap_parts, add_part, replace_by_pickle, edit,
    forge, forge, forge_tensors, forge_tensors,
)  # fmt: skip
BY_DESIGN = (forge, forge_tensors)  # whoever makes seals anew may also change settings


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.slow
def test_damaged_checkpoint_is_refused_by_name(finished_run: RunFolder, tmp_path: Path) -> None:
    loader = Loader(finished_run)
    expected = loader.load(finished_run)
    run = RunFolder(tmp_path / "run")
    shutil.copytree(finished_run.path, run.path)
    folder = run.checkpoint(ROUND)
    found: Counter[str] = Counter()
    longest = ""
    for number in range(CASES):
        draw = random.Random(number)
        shutil.rmtree(folder)
        shutil.copytree(finished_run.checkpoint(ROUND), folder)
        damage = draw.choice(DAMAGES)
        damage(folder, draw)
        try:
            loaded = loader.load(run)
        except EsperError as error:
            found[f"{damage.__name__}: refused"] += 1
            longest = max(longest, str(error), key=len)
            continue
        except BaseException as error:
            raise AssertionError(f"case {number}, {damage.__name__}: {error!r}") from error
        # A change of what means nothing, as of white space, may load; a forger may rename a run.
        found[f"{damage.__name__}: loaded"] += 1
        assert damage in BY_DESIGN or same(loaded, expected), f"case {number}: {damage.__name__}"
    assert len(longest) < 1000, longest
    assert not (tmp_path / MARK).exists(), "something was executed"
    print(f"\n{CASES} cases: {dict(sorted(found.items()))}")
    refused = sum(count for name, count in found.items() if name.endswith("refused"))
    assert refused > 0.9 * CASES


def test_checkpoint_of_another_round_is_refused(finished_run: RunFolder, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    shutil.copytree(finished_run.path, run.path)
    shutil.rmtree(run.checkpoint(2))
    shutil.copytree(run.checkpoint(1), run.checkpoint(2))
    with pytest.raises(EsperError, match="of another round"):
        run.read_checkpoint(2)


def test_agent_of_a_run_loads_by_itself(finished_run: RunFolder) -> None:
    loaded = PPOAgent.load(finished_run.checkpoint(ROUND) / "agent-0")
    assert loaded.buffer.num_envs == finished_run.config.envs
