"""Nested state, of optimisers, schedulers or samples, as JSON and tensors, which files can hold."""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.leyline.errors import EsperError

# How what JSON has no word for is written: {"dict": [[key, value], ...]} and the like.
_MAPPINGS = {kind.__name__: kind for kind in (dict, Counter, OrderedDict)}


class KeepingError(EsperError):
    """Something that cannot be saved, or that does not fit what was saved."""


def packed(value: Any, tensors: dict[str, Tensor], *, of: str, where: str = "state") -> Any:
    """What `unpacked` makes the same of again; its tensors go into `tensors`, by their places."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.ndarray):
        return {"array": packed(torch.from_numpy(value), tensors, of=of, where=where)["tensor"]}
    if isinstance(value, Tensor):
        while where in tensors:  # keys may be alike as text
            where += "_"
        tensors[where] = value
        return {"tensor": where}
    if isinstance(value, list):
        return [packed(v, tensors, of=of, where=f"{where}.{n}") for n, v in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": packed(list(value), tensors, of=of, where=where)}
    if type(value) in _MAPPINGS.values():
        pairs = [((key, each), f"{where}.{key}") for key, each in value.items()]
        kept = [[packed(v, tensors, of=of, where=place) for v in pair] for pair, place in pairs]
        return {type(value).__name__: kept}
    raise KeepingError(
        f"{of} keeps something that cannot be saved",
        given=f"{where}: {type(value).__name__}",
        valid="tensors, arrays, numbers, texts, lists, tuples and dicts",
    )


def unpacked(note: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(note, list):
        return [unpacked(each, tensors) for each in note]
    if not isinstance(note, dict):
        return note
    ((name, parts),) = note.items()
    if name == "tensor":
        return tensors[parts]
    if name == "array":
        return tensors[parts].numpy()
    if name == "tuple":
        return tuple(unpacked(parts, tensors))
    return _MAPPINGS[name](dict(unpacked(parts, tensors)))
