"""Every key of every JSON and TOML of a run with a wrong value, its seals made anew, and bytes of
every file flipped: each look and each resumption ends well or with one sentence."""

import json
import os
import random
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import esper
from esper.archive.files import as_toml
from esper.archive.tensors import sealed
from esper.simic.training import train_run
from tests.programs import esper_here
from tests.simic.training.tiny import tiny_run

STRANGE = (None, True, -1, 3.5, 10**30, "x", [], [1], {}, {"a": 1}, float("nan"))
CASES = int(os.environ.get("ESPER_KEYS", "24"))
X = torch.arange(96.0).view(32, 3) / 96


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A training and a network, both finished."""
    home = tmp_path_factory.mktemp("keys")
    run = tiny_run(home / "training", rounds=1)
    assert train_run(run)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    given = {"loss": "cross_entropy", "budget": None, "controller": "never", "quiet": True}
    data = (X, (X.sum(1) > 1.4).long())
    origin = {"model": "net.py:Net", "data": "digits", "seed": 0, "flat": False, "samples": None}
    origin |= {"device": "cpu", "sinks": []}
    esper.grow(model, data, data, epochs=1, out=home / "network", origin=origin, **given)
    return [run.path, home / "network"]


def documents(run: Path) -> Iterator[Path]:
    yield from sorted(each for each in run.rglob("*") if each.suffix in (".json", ".toml"))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


def changed(file: Path, draw: random.Random) -> str:
    """Change a value somewhere inside, and make all seals of the file anew."""
    text = file.read_text(encoding="utf-8")
    document = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    body = document["body"] if file.name == "manifest.json" else document
    holder, key = draw.choice([each for each in places(body) if each[1] != "seal"])
    holder[key] = draw.choice(STRANGE)
    if file.suffix == ".toml":
        file.write_text(as_toml(document), encoding="utf-8")
    else:
        if file.name == "manifest.json":
            document["seal"] = sealed(body)
        else:
            document["seal"] = sealed({n: v for n, v in document.items() if n != "seal"})
        file.write_text(json.dumps(document), encoding="utf-8")
    return f"{file.name}: {key} = {holder[key]!r}"


def flipped(file: Path, draw: random.Random) -> str:
    data = bytearray(file.read_bytes())
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
    return f"{file.name}: a bit"


@pytest.mark.slow
def test_whatever_stands_in_a_runs_files_is_used_or_refused_in_one_sentence(
    runs: list[Path], tmp_path: Path
) -> None:
    draw, wrong, copy = random.Random(CASES), [], tmp_path / "run"
    for number in range(CASES):
        run = runs[number % 2]
        shutil.copytree(run, copy)
        if number % 3:
            said = changed(draw.choice(list(documents(copy))), draw)
        else:
            said = flipped(draw.choice(sorted(f for f in copy.rglob("*") if f.is_file())), draw)
        for words in (["show", copy], ["runs", tmp_path], ["resume", copy, "--quiet"]):
            try:
                told = esper_here(*words)
            except BaseException as error:
                wrong.append(f"{run.name}/{said}, {words[0]}: {type(error).__name__}: {error}")
                continue
            lines = [each for each in told.stderr.splitlines() if each.startswith("esper: ")]
            if told.returncode not in (0, 2) or (told.returncode == 2) != (len(lines) == 1):
                wrong.append(f"{run.name}/{said}, {words[0]}: {told.returncode} {told.stderr}")
        shutil.rmtree(copy)
    assert not wrong, "\n".join(wrong)
