"""The grown network as a file that other programs run: a `torch.export` archive, or ONNX."""

import importlib
import inspect
import io
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from esper.kasmina.export import (
    export_module,
    largest_difference,
    require_equal,
    run,
    set_evaluating,
)
from esper.kasmina.isolation import state_kept
from esper.kasmina.probe import Sample
from esper.kasmina.slotted import SlottedModel
from esper.leyline.errors import ExportError, first_line

TOLERANCE = 1e-5  # of the largest number in an output, or of 1
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
WEIGHTS_BESIDE = ".data"  # what such a second file's name ends in
SINGLE_FILE_BYTES = 2_000_000_000  # an ONNX file holds less than 2 GiB; then weights go beside it


@dataclass(frozen=True)
class Written:
    """Where a network was written, and how far its outputs are from the host's at most."""

    path: Path
    difference: float


def export_program(
    host: SlottedModel, sample: Sample, path: str | Path, *, dynamic_batch: bool = True
) -> Written:
    """Write the committed network in eval mode as a `torch.export` archive (.pt2).

    `torch.export.load(path).module()` runs it, with no class of Esper's or yours, on the device
    that the host is on. With `dynamic_batch` it takes batches of any size: every input whose
    first axis is as long as the first input's may vary there.

    The file is read back and compared with the network within 1e-5, also on a batch of twice the
    size, before it gets its name; the largest difference is returned.
    """
    _require_target(Path(path), ".pt2", rb"PK\x03\x04")
    model = export_module(host, sample)
    set_evaluating(model)
    program = capture(model, sample, dynamic_batch)

    def load(file: Path) -> Callable[[Sample], object]:
        loaded = torch.export.load(file).module()
        return lambda inputs: run(loaded, inputs, evaluating=False)

    with _written(Path(path)) as file:
        torch.export.save(program, file)
        difference = _compare(model, sample, dynamic_batch, load(file), "The saved program")
    return Written(Path(path), difference)


def export_onnx(
    host: SlottedModel, sample: Sample, path: str | Path, *, dynamic_batch: bool = True
) -> Written:
    """Write the committed network in eval mode as an ONNX file, for any runtime that reads it.

    Inputs and outputs are the tensors of the sample and of the network's output, in order;
    `dynamic_batch` is as in `export_program`. Above 2 GB the weights are in a second file beside
    it. The file is run through onnxruntime on the CPU and compared within 1e-5 before it gets
    its name; the largest difference is returned.
    """
    runtime = _require_packages()["onnxruntime"]
    _require_target(Path(path), ".onnx", rb"\x08.\x12\x07pytorch")
    model = export_module(host, sample).cpu()
    set_evaluating(model)
    sample = tree_map_only(Tensor, Tensor.cpu, sample)
    program = capture(model, sample, dynamic_batch)
    try:
        with _quiet():
            onnx = torch.onnx.export(program, dynamo=True, verbose=False)
    except Exception as error:  # a converter for each of hundreds of operations
        raise ExportError(
            "The network cannot be converted to ONNX",
            given=origin_of(error),
            fix="export_program has no such limit",
        ) from error
    assert onnx is not None

    def load(file: Path) -> Callable[[Sample], object]:
        options = runtime.SessionOptions()
        options.log_severity_level = 3  # errors
        session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        names = [each.name for each in session.get_inputs()]

        def infer(inputs: Sample) -> object:
            tensors = [leaf for leaf in tree_leaves(call_of(inputs)) if isinstance(leaf, Tensor)]
            feed = {
                name: value.detach().numpy() for name, value in zip(names, tensors, strict=True)
            }
            return [torch.from_numpy(array) for array in session.run(None, feed)]

        return infer

    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    with _written(Path(path)) as file:
        onnx.save(file, external_data=weights > SINGLE_FILE_BYTES)
        difference = _compare(model, sample, dynamic_batch, load(file), "The ONNX file", flat=True)
    return Written(Path(path), difference)


def _require_packages() -> dict[str, ModuleType]:
    found: dict[str, ModuleType] = {}
    for name in ONNX_PACKAGES:
        try:
            found[name] = importlib.import_module(name)
        except ImportError as error:
            raise ExportError(
                "Export to ONNX needs packages that are not installed",
                given=f"no {name}",
                valid=", ".join(ONNX_PACKAGES),
                fix="pip install 'esper-ml[export]'",
            ) from error
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks about packages it can do without and about its own insides."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# --- inputs ----------------------------------------------------------------------------------


def call_of(sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The sample as positional and keyword arguments."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, (tuple, list)):
        return tuple(sample), {}
    return (sample,), {}


def _batch(sample: Sample) -> int:
    """The length of the first input's first axis."""
    leaves = tree_leaves(call_of(sample))
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not sizes or sizes[0] < 2:
        raise ExportError(
            "The sample does not show what may vary with the batch",
            given=f"a batch of {sizes[0]}" if sizes else "no input with an axis",
            valid="a batch of 2 or more",
            fix="give a larger sample, or dynamic_batch=False",
        )
    return int(sizes[0])


def doubled(sample: Sample) -> Sample:
    """The sample twice over, in one batch."""
    batch = _batch(sample)

    def double(tensor: Tensor) -> Tensor:
        varies = tensor.dim() > 0 and tensor.shape[0] == batch
        return torch.cat([tensor, tensor]) if varies else tensor

    doubled: Sample = tree_map_only(Tensor, double, sample)
    return doubled


# --- writing and checking --------------------------------------------------------------------


def capture(model: nn.Module, sample: Sample, dynamic_batch: bool) -> ExportedProgram:
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone(), call_of(sample))
    shapes = None
    if dynamic_batch:
        batch, size = Dim("batch"), _batch(sample)
        named = inspect.signature(model.forward).bind(*args, **kwargs).arguments

        def axes(value: object) -> dict[int, Dim] | None:
            varies = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == size
            return {0: batch} if varies else None

        shapes = tree_map(axes, dict(named))
    try:
        with torch.no_grad(), state_kept(model), _quiet():
            return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # the user's code, under a tracer
        raise ExportError(
            "torch.export cannot capture the network",
            given=origin_of(error),
            fix=_advice(origin_of(error), dynamic_batch),
        ) from error


def _advice(reason: str, dynamic_batch: bool) -> str | None:
    if "data-dependent" in reason:
        return "where it branches on the values of a tensor, let torch.where choose"
    if dynamic_batch:
        return (
            "if the batch is the reason, write x.shape[0] in place of len(x) in the model, or "
            "keep the sample's batch size with dynamic_batch=False"
        )
    return None


def origin_of(error: BaseException) -> str:
    """The error that began it: torch wraps it in others that say what to do next."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


def require_folder(path: Path) -> None:
    """Raise unless there is a folder in which `path` can be written."""
    if not path.parent.is_dir():
        raise ExportError("There is no such folder", given=path.parent, fix="make it first")


def _require_target(path: Path, suffix: str, beginning: bytes) -> None:
    """Raise if `path` is no name for such a file, or has it and does not begin like one."""
    require_folder(path)
    if path.is_dir():
        raise ExportError(f"{path} is a folder", fix="name a file")
    if path.suffix != suffix:
        raise ExportError(
            f"The file's name must end in {suffix}",
            given=path.name,
            fix=f"for example {path.with_suffix(suffix)}" if path.name else None,
        )
    beside = path.with_name(path.name + WEIGHTS_BESIDE)
    if path.exists() and not _begins_with(path, beginning):
        raise ExportError(
            f"{path} is not an earlier export", given="another file", fix="name a new file"
        )
    if beside.exists() and not path.exists():
        raise ExportError(
            f"{beside} would be written over", given="another file", fix="name a new file"
        )


def _begins_with(path: Path, pattern: bytes) -> bool:
    with path.open("rb") as file:
        return re.match(pattern, file.read(64), re.DOTALL) is not None


@contextmanager
def _written(path: Path) -> Iterator[Path]:
    """A file to write that becomes `path`, with any files beside it, once all went well."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        file = Path(folder) / path.name
        try:
            yield file
        except ExportError:
            raise
        except Exception as error:  # the runtimes' own errors have no common base
            raise ExportError(
                f"{path.name!r} could not be written, read back and run", given=origin_of(error)
            ) from error
        for other in Path(folder).iterdir():
            if other != file:
                os.replace(other, path.parent / other.name)
        os.replace(file, path)


def _compare(
    model: nn.Module,
    sample: Sample,
    dynamic_batch: bool,
    saved: Callable[[Sample], object],
    what: str,
    *,
    flat: bool = False,
) -> float:
    """The largest difference between what was saved and the model, on the sample and on twice it.

    Raises if it is too large; `flat` if what was saved gives only tensors.
    """
    largest = 0.0
    for inputs in (sample, doubled(sample)) if dynamic_batch else (sample,):
        wanted = run(model, inputs, evaluating=True)
        if flat:
            wanted = [leaf for leaf in tree_leaves(wanted) if isinstance(leaf, Tensor)]
        given = saved(inputs)
        require_equal(wanted, given, tolerance_of(model), what)
        largest = max(largest, largest_difference(wanted, given))
    return largest


def tolerance_of(model: nn.Module) -> float:
    """Half precision cannot agree to 1e-5."""
    floats = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max([TOLERANCE, *(8 * torch.finfo(dtype).eps for dtype in floats)])
