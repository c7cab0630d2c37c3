"""Nested results as flat names and numbers."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any


def flatten(metrics: Mapping[str, Any]) -> dict[str, float]:
    """`{"heads": {"op": {"kl": 0.1}}}` as `{"heads.op.kl": 0.1}`; what is no number is left out.

    Mappings and dataclasses may be nested; numbers, truth values and tensors of one number count.
    """
    return dict(_walk("", metrics))


def _walk(path: str, value: Any) -> list[tuple[str, float]]:
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        found = []
        for name, inner in value.items():
            found += _walk(f"{path}.{name}" if path else str(name), inner)
        return found
    if isinstance(value, Real) or getattr(value, "shape", None) == ():
        return [(path, float(value))]
    return []
