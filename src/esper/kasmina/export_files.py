"""What all exports share: outputs are compared with the host's, and files appear whole or not at
all, in the place of nothing but an earlier export.
"""

import copy
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from esper.archive.files import replace_whole
from esper.kasmina.isolation import randomness_kept, state_kept
from esper.kasmina.watching import Arguments, Sample, arguments_of
from esper.leyline.errors import ExportError, first_line

TOLERANCE = 1e-5  # of the largest number in an output, or of 1
WEIGHTS_BESIDE = ".data"  # what the name of an ONNX file's second one ends in


@dataclass(frozen=True)
class Written:
    """Where a network was written, and how far its outputs are from the host's at most."""

    path: Path
    difference: float


@contextmanager
def failing(what: str, *, valid: str | None = None, fix: str | None = None) -> Iterator[None]:
    """Inside runs code of the user's or of a runtime: whatever it raises becomes one error."""
    try:
        yield
    except ExportError:
        raise
    except Exception as error:  # those that are not Esper's have no common base
        raise ExportError(what, given=origin_of(error), valid=valid, fix=fix) from error


def origin_of(error: BaseException) -> str:
    """The error that began it: torch wraps it in others that say what to do next."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


# --- running and comparing -------------------------------------------------------------------


def run(module: nn.Module, sample: Sample, *, evaluating: bool = False) -> object:
    """The output on the sample, with random numbers of its own; nothing remembers the run."""
    args, kwargs = copied(sample)
    with state_kept(module), randomness_kept(module, stream=0), torch.no_grad():
        if evaluating:
            set_evaluating(module)
        output = tree_map_only(Tensor, Tensor.detach, module(*args, **kwargs))
        return copy.deepcopy(output)  # it may share memory with a buffer


def copied(sample: Sample) -> Arguments:
    """Arguments that a network may change without changing the sample."""
    copies: Arguments = tree_map_only(Tensor, lambda t: t.detach().clone(), arguments_of(sample))
    return copies


def set_evaluating(module: nn.Module) -> None:
    """Eval mode everywhere, also where a module's own `train` would not have it."""
    for part in module.modules():
        part.training = False


def tolerance_of(model: nn.Module) -> float:
    """Half precision cannot agree to 1e-5."""
    floats = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max([TOLERANCE, *(8 * torch.finfo(dtype).eps for dtype in floats)])


def largest_difference(model: nn.Module, what: str, outputs: Iterable[Sequence[object]]) -> float:
    """Between pairs of outputs, wanted and given; raises if the model's precision allows less."""
    tolerance = tolerance_of(model)
    return max(require_equal(wanted, given, tolerance, what) for wanted, given in outputs)


def require_equal(wanted: object, given: object, tolerance: float, what: str) -> float:
    """The largest difference between two outputs.

    Raises unless all tensors agree within `tolerance` of the largest number in them, or of 1.
    """
    largest = 0.0
    for where, left, right in _pairs(wanted, given, "output"):
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            difference, limit = _difference(left, right, tolerance)
            if not difference <= limit:
                raise ExportError(
                    f"{what} does not give what the host gives",
                    given=f"{where} differs by up to {difference:.3g}",
                    valid=f"at most {limit:.3g}",
                )
            largest = max(largest, difference)
        elif type(left) is not type(right) or not np.all(left == right):
            raise ExportError(
                f"{what} does not return what the host returns",
                given=f"{type(right).__name__} as {where}",
                valid=f"{type(left).__name__}, the same",
            )
    return largest


def _pairs(left: Any, right: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Corresponding leaves of two outputs, down to where they no longer correspond."""
    inside: list[tuple[str, Any, Any]] | None = None
    if type(left) is type(right) and not isinstance(left, Tensor):
        if isinstance(left, Mapping) and list(left) == list(right):
            inside = [(f"[{key!r}]", left[key], right[key]) for key in left]
        elif isinstance(left, (tuple, list)) and len(left) == len(right):
            pairs = enumerate(zip(left, right, strict=True))
            inside = [(f"[{index}]", one, other) for index, (one, other) in pairs]
        elif hasattr(left, "__dict__") and list(vars(left)) == list(vars(right)):
            inside = [(f".{name}", value, vars(right)[name]) for name, value in vars(left).items()]
    if inside is None:
        yield where, left, right
    for step, one, other in inside or ():
        yield from _pairs(one, other, where + step)


def _difference(left: Tensor, right: Tensor, tolerance: float) -> tuple[float, float]:
    """The largest difference, and the largest that is accepted; NaN and infinities match alike."""
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return float("inf"), tolerance
    if left.numel() == 0:
        return 0.0, tolerance
    if left.layout != torch.strided:
        left, right = left.to_dense(), right.to_dense()
    if not (left.is_floating_point() or left.is_complex()):
        return float((left != right).any()), 0.0
    wide = torch.complex128 if left.is_complex() else torch.float64
    one, other = left.to(wide), right.to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    difference = torch.where(same, 0.0, (one - other).abs())
    finite = one.abs()[one.isfinite()]
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    return float(difference.max()), tolerance * scale


# --- writing ---------------------------------------------------------------------------------


@contextmanager
def writing(target: Path, file: Path) -> Iterator[Path]:
    """Write files in a temporary folder and move them to their place if nothing was raised.

    The temporary folder is beside `target`, because a file is moved atomically only within one
    file system. A process that is killed leaves it behind; later exports ignore it.

    Args:
        target: The exported file or folder.
        file: Path of the main file of the export.

    Yields:
        The path at which the main file is written. Other files that are written beside it are
        moved before it.
    """
    with tempfile.TemporaryDirectory(
        dir=target.parent, prefix=f".{target.name}-", ignore_cleanup_errors=True
    ) as temporary_folder:
        draft = Path(temporary_folder) / file.name
        with failing(f"{target.name!r} could not be written, read back and run"):
            yield draft
        file.parent.mkdir(exist_ok=True)
        for path in draft.parent.iterdir():
            if path.is_file() and path != draft:
                replace_whole(path, file.parent / path.name)
        replace_whole(draft, file)


def require_file_target(path: Path, suffix: str, beginning: bytes) -> None:
    """Raise if `path` is no name for such a file, or has it and does not begin like one."""
    require_place(path, "file")
    if path.suffix != suffix:
        raise ExportError(
            f"The file's name must end in {suffix}",
            given=path.name,
            fix=f"for example {path.with_suffix(suffix)}" if path.name else None,
        )
    beside = path.with_name(path.name + WEIGHTS_BESIDE)
    foreign = None
    if path.exists() and not begins_with(path, beginning):
        foreign = f"{path} is not an earlier export"
    elif beside.exists() and not path.exists():
        foreign = f"{beside} would be written over"
    if foreign is not None:
        raise ExportError(foreign, given="another file", fix="name a new file")


def require_place(path: Path, kind: str) -> None:
    """Raise unless a file, or a folder, of this name can be written."""
    if not path.parent.is_dir():
        raise ExportError("There is no such folder", given=path.parent, fix="make it first")
    found = "folder" if path.is_dir() else "file" if path.exists() else kind
    if found != kind:
        raise ExportError(f"{path} is a {found}", fix=f"name a {kind}")


def begins_with(path: Path, pattern: bytes) -> bool:
    with path.open("rb") as file:
        return re.match(pattern, file.read(256), re.DOTALL) is not None
