"""Models and data of yours, named on the command line.

A model is `file.py:name`; data is a set that Esper knows, a file of arrays, or your code too.

Shapes: `M` samples.
"""

import ast
import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from esper.api.scoring import form
from esper.datasets.splitting import partition
from esper.garden import FAMILIES, DataFamily, Source
from esper.garden.own_code import run_file, spoken
from esper.leyline.errors import DataError, EsperError, UnknownNameError, in_words
from esper.tolaria import Task, find_task, task_names
from esper.tolaria.data.removed_sets import refuse_removed_set
from esper.tolaria.data.splits import Splits

HELD_OUT = 0.2  # of a file without splits of its own
SUFFIXES = (".npz", ".safetensors")
OTHERWISE = (
    "or a file of arrays (.npz, .safetensors), or FILE.py:NAME of a function that returns "
    "(train, val), or of a task or family of yours"
)


def absolute(text: str) -> str:
    """`file.py:name` or a file with its whole path, so that it means the same from anywhere."""
    file, colon, name = text.rpartition(":")
    if colon:
        return f"{Path(file).resolve()}:{name}"
    return str(Path(text).resolve()) if Path(text).is_file() else text


def code_of(named: Iterable[str]) -> list[str]:
    """The Python files among what is named."""
    return list(dict.fromkeys(text.rpartition(":")[0] for text in named if ":" in text))


def load_named(text: str, what: str) -> object:
    """What `file.py:name` names, after the file was run; `what` says what is looked for."""
    file_text, colon, name = text.rpartition(":")
    if not colon:
        file_text, name = text, ""
    file = Path(file_text)
    if file.suffix != ".py" or not file.is_file():
        found = ", ".join(sorted(each.name for each in file.parent.glob("*.py"))[:5])
        fix = f"in {file.parent.resolve().name} there are {found}" if found else None
        raise EsperError(
            f"There is no Python file for the {what}",
            given=text,
            valid=f"FILE.py:NAME, such as my_{what}.py:Net",
            fix=fix if file.parent.is_dir() else f"there is no folder {file.parent}",
        )
    if not name:
        raise EsperError(
            f"Say which part of {file} is the {what}",
            given=text,
            valid=", ".join(f"{file}:{each}" for each in _defined(file)) or "FILE.py:NAME",
        )
    module = run_file(file)
    if not hasattr(module, name):
        raise UnknownNameError.of(f"name in {file}", name, _defined(file))
    return getattr(module, name)


def build_model(text: str, seed: int) -> nn.Module:
    """The model that `file.py:name` names: a class or a function without arguments, or the model
    itself. Its first weights follow from the seed."""
    model = load_named(text, "model")
    if callable(model) and not isinstance(model, nn.Module):
        torch.manual_seed(seed)
        model = call_named(model, text, "returns the model")
    if not isinstance(model, nn.Module):
        raise EsperError(
            f"{text} does not give a model",
            given=type(model).__name__,
            valid="a subclass of nn.Module, a function that returns one, or one itself",
        )
    return model


def call_named(thing: object, text: str, purpose: str) -> object:
    """Call a function or class of yours that takes no arguments."""
    assert callable(thing)
    file, _, name = text.rpartition(":")
    fix = f"write a function without arguments in {file} that {purpose}, and name that"
    with suppress(ValueError), in_words(f"{name} needs arguments", TypeError, fix=fix):
        inspect.signature(thing).bind()  # (a ValueError: of something built in)
    with in_words(f"{text} fails", say=lambda error: spoken(error, file)):
        return thing()


def _defined(file: Path) -> list[str]:
    """Classes and functions at the top of a file, found without running it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [n.name for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]


# --- data -----------------------------------------------------------------------------------------


# What to train on, to decide by and, if there is any, to report on: as `esper.grow` takes them.
PARTS = ("train", "val", "test")
NamedData = dict[str, Any]


def _named(parts: Iterable[Any]) -> NamedData:
    pairs = zip(PARTS, parts, strict=False)
    return {name: part for name, part in pairs if part is not None}


def _split(splits: Splits) -> NamedData:
    return _named(map(tuple, splits.named().values()))


def load_data(
    text: str, *, seed: int = 0, flat: bool = False, samples: int | None = None
) -> NamedData:
    """The data that `text` names; `flat` makes every input a vector, `samples` trains on fewer."""
    if Path(text).suffix in SUFFIXES:
        data = _from_file(Path(text), seed)
    elif ":" in text or text.endswith(".py"):
        data = _from_code(text, seed)
    else:
        name = text.replace("-", "_")
        if name not in task_names():
            refuse_removed_set(name)
            # A task for the dense host has the data of the task without the suffix.
            data_sets = [task for task in task_names() if not task.endswith("_mlp")]
            raise UnknownNameError.of("data", text, data_sets, fix=OTHERWISE)
        data = _split(find_task(name).load(seed))
    if samples is not None and samples < 1:
        raise DataError("There must be something to train on", given=f"{samples} samples")
    if not (flat or samples):
        return data
    if not isinstance(data["train"], tuple):
        given = f"{text} gives a {type(data['train']).__name__}"
        fix = "do the same in your function"
        raise DataError("--flat and --samples are for tensors", given=given, fix=fix)
    data["train"] = tuple(each[:samples] for each in data["train"])
    if flat:
        data |= {name: (inputs.flatten(1), targets) for name, (inputs, targets) in data.items()}
    return data


def _from_code(text: str, seed: int) -> NamedData:
    found = load_named(text, "data")
    if isinstance(found, Task):
        return _split(found.load(seed))
    if isinstance(found, DataFamily):
        for name, family in FAMILIES.items():
            if family is found:
                return _split(Source(family=name, seed=seed).load())
        raise EsperError(f"{text} is not registered", fix="register_family(NAME, it) in its file")
    if callable(found):
        found = call_named(found, text, "returns (train, val)")
    if not isinstance(found, (tuple, list)) or len(found) not in (2, 3):
        size = f" of {len(found)}" if isinstance(found, (tuple, list)) else ""
        raise DataError(
            f"{text} does not give data",
            given=f"{type(found).__name__}{size}",
            valid="(train, val) or (train, val, test); each a DataLoader, a Dataset or a pair of "
            "tensors",
        )
    return _named(found)


def _from_file(file: Path, seed: int) -> NamedData:
    arrays = _arrays(file)
    if {"inputs", "targets"} <= arrays.keys():
        inputs, targets = _pair(file, arrays, "")
        parts = partition(len(inputs), {"validation": HELD_OUT}, seed)
        return _named((inputs[rows], targets[rows]) for rows in parts.values())
    splits = PARTS if "test_inputs" in arrays else PARTS[:2]
    wanted = [f"{split}_{part}" for split in splits for part in ("inputs", "targets")]
    if not set(wanted) <= arrays.keys():
        raise DataError(
            f"{file} does not hold what is needed",
            given=", ".join(sorted(arrays)) or "nothing",
            valid=f"inputs and targets, or {', '.join(wanted)} (and test_...)",
        )
    return _named(_pair(file, arrays, f"{split}_") for split in splits)


def _arrays(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise DataError(f"There is no file {file}", fix="check the path of --data")
    # (Of a damaged file, the readers' errors have no common base.)
    with in_words(f"{file} cannot be read", valid="arrays of numbers", error=DataError):
        if file.suffix == ".safetensors":
            return load_file(file)
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            return {name: torch.from_numpy(stored[name]) for name in stored.files}


def _pair(file: Path, arrays: Mapping[str, Tensor], prefix: str) -> tuple[Tensor, Tensor]:
    inputs, targets = arrays[f"{prefix}inputs"], arrays[f"{prefix}targets"]
    together = inputs.dim() >= 2 and inputs.shape[:1] == targets.shape[:1] and len(inputs)
    if not together or inputs.is_complex() or targets.is_complex():
        raise DataError(
            f"The inputs and targets in {file} do not belong together",
            given=f"inputs {form(inputs)}, targets {form(targets)}",
            valid="real numbers, [M, ...] and [M] or [M, ...] with the same number of samples M",
        )
    return _ready(inputs, picture=True), _ready(targets, picture=False)


def _ready(tensor: Tensor, *, picture: bool) -> Tensor:
    """Fractions as float32, whole numbers as int64; bytes of inputs become fractions of 255."""
    if picture and tensor.dtype == torch.uint8:
        return tensor.float() / 255
    return tensor.float() if tensor.is_floating_point() else tensor.long()
