"""Data named on the command line: a data set that Esper knows, a file of arrays, or your code.

Shapes: `M` samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from esper.karn.named_code import call_named, load_named
from esper.leyline.errors import DataError, UnknownNameError
from esper.tolaria import find_task, task_names
from esper.tolaria.data.splits import Split, partition

HELD_OUT = 0.2  # of a file without splits of its own
SUFFIXES = (".npz", ".safetensors")
OTHERWISE = (
    "or a file of arrays (.npz, .safetensors), or FILE.py:FUNCTION that returns (train, val)"
)


@dataclass(frozen=True)
class NamedData:
    """What to train on, to decide by and, if there is any, to report on; as `esper.grow` takes."""

    train: Any
    val: Any
    test: Any | None = None


def load_data(
    text: str, *, seed: int = 0, flat: bool = False, samples: int | None = None
) -> NamedData:
    """The data that `text` names; `flat` makes every input a vector, `samples` trains on fewer."""
    if Path(text).suffix in SUFFIXES:
        data = _from_file(Path(text), seed)
    elif ":" in text or text.endswith(".py"):
        data = _from_code(text)
    else:
        data = _from_task(text, seed)
    if samples is not None and samples < 1:
        raise DataError("There must be something to train on", given=f"{samples} samples")
    if not (flat or samples):
        return data
    if not isinstance(data.train, tuple):
        raise DataError(
            "--flat and --samples are for tensors",
            given=f"{text} gives a {type(data.train).__name__}",
            fix="do the same in your function",
        )
    inputs, targets = data.train
    data = NamedData((inputs[:samples], targets[:samples]), data.val, data.test)
    return _flattened(data) if flat else data


def _flattened(data: NamedData) -> NamedData:
    def flat(split: Any) -> Any:
        return None if split is None else (split[0].flatten(1), split[1])

    return NamedData(flat(data.train), flat(data.val), flat(data.test))


def _from_task(text: str, seed: int) -> NamedData:
    name = text.replace("-", "_")
    known = [each for each in task_names() if not each.endswith("_mlp")]  # the same data again
    if name not in task_names():
        raise UnknownNameError.of("data", text, known, fix=OTHERWISE)
    splits = find_task(name).load(seed)
    return NamedData(tuple(splits.train), tuple(splits.validation), tuple(splits.test))


def _from_code(text: str) -> NamedData:
    found = load_named(text, "data")
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
    return NamedData(*found)


def _from_file(file: Path, seed: int) -> NamedData:
    arrays = _arrays(file)
    if {"inputs", "targets"} <= arrays.keys():
        inputs, targets = _pair(file, arrays, "")
        parts = partition(len(inputs), {"validation": HELD_OUT}, seed)
        whole = Split(inputs, targets)
        return NamedData(tuple(whole.take(parts["train"])), tuple(whole.take(parts["validation"])))
    wanted = [f"{split}_{part}" for split in ("train", "val") for part in ("inputs", "targets")]
    if not set(wanted) <= arrays.keys():
        raise DataError(
            f"{file} does not hold what is needed",
            given=", ".join(sorted(arrays)) or "nothing",
            valid=f"inputs and targets, or {', '.join(wanted)} (and test_...)",
        )
    test = _pair(file, arrays, "test_") if "test_inputs" in arrays else None
    return NamedData(_pair(file, arrays, "train_"), _pair(file, arrays, "val_"), test)


def _arrays(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise DataError(f"There is no file {file}", fix="check the path of --data")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            return {name: torch.from_numpy(stored[name]) for name in stored.files}
    except Exception as error:  # of a damaged file, the readers' errors have no common base
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(
            f"{file} cannot be read", given=reason, valid="arrays of numbers"
        ) from error


def _pair(file: Path, arrays: Mapping[str, Tensor], prefix: str) -> tuple[Tensor, Tensor]:
    try:
        inputs, targets = arrays[f"{prefix}inputs"], arrays[f"{prefix}targets"]
    except KeyError as error:
        raise DataError(f"{file} does not hold what is needed", given=f"no {error}") from error
    shapes = inputs.shape, targets.shape
    if inputs.dim() < 2 or shapes[0][:1] != shapes[1][:1] or not len(inputs):
        raise DataError(
            f"The inputs and targets in {file} do not belong together",
            given=f"inputs {list(shapes[0])}, targets {list(shapes[1])}",
            valid="[M, ...] and [M] or [M, ...], with the same number of samples M",
        )
    if inputs.is_complex() or targets.is_complex():
        raise DataError(
            f"{file} holds complex numbers",
            given=f"inputs {inputs.dtype}, targets {targets.dtype}",
            valid="real numbers",
            fix="store the real and the imaginary part as two features",
        )
    return _ready(inputs, picture=True), _ready(targets, picture=False)


def _ready(tensor: Tensor, *, picture: bool) -> Tensor:
    """Fractions as float32, whole numbers as int64; bytes of inputs become fractions of 255."""
    if picture and tensor.dtype == torch.uint8:
        return tensor.float() / 255
    return tensor.float() if tensor.is_floating_point() else tensor.long()
