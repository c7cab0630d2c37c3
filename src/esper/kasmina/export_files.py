"""The grown network as a file that other programs run: a `torch.export` archive, or ONNX."""

import importlib
import inspect
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from esper.kasmina.export import export_module, require_equal, run, set_evaluating
from esper.kasmina.plain import first_line
from esper.kasmina.probe import Sample
from esper.kasmina.slotted import SlottedModel
from esper.leyline.errors import ExportError

TOLERANCE = 1e-5  # of the largest number in an output, or of 1
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
SINGLE_FILE_BYTES = 2_000_000_000  # an ONNX file holds less than 2 GiB; then weights go beside it


def export_program(
    host: SlottedModel, sample: Sample, path: str | Path, *, dynamic_batch: bool = True
) -> Path:
    """Write the committed network in eval mode as a `torch.export` archive (.pt2).

    `torch.export.load(path).module()` runs it, with no class of Esper's or yours, on the device
    that the host is on. With `dynamic_batch` it takes batches of any size: every input whose
    first axis is as long as the first input's may vary there.

    The file is read back and compared with the network within 1e-5, also on a batch of twice the
    size, before it gets its name.
    """
    model = export_module(host, sample)
    set_evaluating(model)
    program = _capture(model, sample, dynamic_batch)

    def load(file: Path) -> Callable[[Sample], object]:
        loaded = torch.export.load(file).module()
        return lambda inputs: run(loaded, inputs, evaluating=False)

    with _written(Path(path)) as file:
        torch.export.save(program, file)
        _compare(model, sample, dynamic_batch, load(file), "The saved program")
    return Path(path)


def export_onnx(
    host: SlottedModel, sample: Sample, path: str | Path, *, dynamic_batch: bool = True
) -> Path:
    """Write the committed network in eval mode as an ONNX file, for any runtime that reads it.

    Inputs and outputs are the tensors of the sample and of the network's output, in order;
    `dynamic_batch` is as in `export_program`. Above 2 GB the weights are in a second file beside
    it. The file is run through onnxruntime on the CPU and compared within 1e-5 before it gets
    its name.
    """
    runtime = _require_packages()["onnxruntime"]
    model = export_module(host, sample).cpu()
    set_evaluating(model)
    sample = tree_map_only(Tensor, Tensor.cpu, sample)
    program = _capture(model, sample, dynamic_batch)
    try:
        with _quiet():
            onnx = torch.onnx.export(program, dynamo=True, verbose=False)
    except Exception as error:  # a converter for each of hundreds of operations
        raise ExportError(
            "The network cannot be converted to ONNX",
            given=_origin(error),
            fix="export_program has no such limit",
        ) from error
    assert onnx is not None

    def load(file: Path) -> Callable[[Sample], object]:
        options = runtime.SessionOptions()
        options.log_severity_level = 3  # errors
        session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        names = [each.name for each in session.get_inputs()]

        def infer(inputs: Sample) -> object:
            tensors = [leaf for leaf in tree_leaves(_call_of(inputs)) if isinstance(leaf, Tensor)]
            feed = {
                name: value.detach().numpy() for name, value in zip(names, tensors, strict=True)
            }
            return [torch.from_numpy(array) for array in session.run(None, feed)]

        return infer

    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    with _written(Path(path)) as file:
        onnx.save(file, external_data=weights > SINGLE_FILE_BYTES)
        _compare(model, sample, dynamic_batch, load(file), "The ONNX file", flat=True)
    return Path(path)


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
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# --- inputs ----------------------------------------------------------------------------------


def _call_of(sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The sample as positional and keyword arguments."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, (tuple, list)):
        return tuple(sample), {}
    return (sample,), {}


def _batch(sample: Sample) -> int:
    """The length of the first input's first axis."""
    leaves = tree_leaves(_call_of(sample))
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not sizes or sizes[0] < 2:
        raise ExportError(
            "The sample does not show what may vary with the batch",
            given=f"a batch of {sizes[0]}" if sizes else "no input with an axis",
            valid="a batch of 2 or more",
            fix="give a larger sample, or dynamic_batch=False",
        )
    return int(sizes[0])


def _doubled(sample: Sample) -> Sample:
    """The sample twice over, in one batch."""
    batch = _batch(sample)

    def double(tensor: Tensor) -> Tensor:
        varies = tensor.dim() > 0 and tensor.shape[0] == batch
        return torch.cat([tensor, tensor]) if varies else tensor

    doubled: Sample = tree_map_only(Tensor, double, sample)
    return doubled


# --- writing and checking --------------------------------------------------------------------


def _capture(model: nn.Module, sample: Sample, dynamic_batch: bool) -> ExportedProgram:
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone(), _call_of(sample))
    shapes = None
    if dynamic_batch:
        batch, size = Dim("batch"), _batch(sample)
        named = inspect.signature(model.forward).bind(*args, **kwargs).arguments

        def axes(value: object) -> dict[int, Dim] | None:
            varies = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == size
            return {0: batch} if varies else None

        shapes = tree_map(axes, dict(named))
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # the user's code, under a tracer
        raise ExportError(
            "torch.export cannot capture the network",
            given=_origin(error),
            fix="dynamic_batch=False may help if the batch size is the reason"
            if dynamic_batch
            else None,
        ) from error


def _origin(error: BaseException) -> str:
    """The error that began it: torch wraps it in others that say what to do next."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


@contextmanager
def _written(path: Path) -> Iterator[Path]:
    """A file to write that becomes `path`, with any files beside it, once all went well."""
    if not path.parent.is_dir():
        raise ExportError("There is no such folder", given=path.parent, fix="make it first")
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        file = Path(folder) / path.name
        try:
            yield file
        except ExportError:
            raise
        except Exception as error:  # the runtimes' own errors have no common base
            raise ExportError(
                f"{path.name!r} could not be written, read back and run", given=_origin(error)
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
) -> None:
    """Raise unless what was saved gives what the model gives; `flat` if it gives only tensors."""
    for inputs in (sample, _doubled(sample)) if dynamic_batch else (sample,):
        wanted = run(model, inputs, evaluating=True)
        if flat:
            wanted = [leaf for leaf in tree_leaves(wanted) if isinstance(leaf, Tensor)]
        require_equal(wanted, saved(inputs), _tolerance(model), what)


def _tolerance(model: nn.Module) -> float:
    """Half precision cannot agree to 1e-5."""
    floats = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max([TOLERANCE, *(8 * torch.finfo(dtype).eps for dtype in floats)])
