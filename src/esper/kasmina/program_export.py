"""The grown network as a file that other programs run: a `torch.export` archive, or ONNX."""

import importlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from esper.kasmina.export_files import (
    Written,
    copied,
    failing,
    largest_difference,
    origin_of,
    require_file_target,
    run,
    set_evaluating,
    writing,
)
from esper.kasmina.isolation import state_kept
from esper.kasmina.layout_inference import batch_size
from esper.kasmina.plain_module import export_module
from esper.kasmina.slotted import SlottedModel
from esper.kasmina.watching import Sample, arguments_of
from esper.leyline.errors import ExportError

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
SINGLE_FILE_BYTES = 2_000_000_000  # an ONNX file holds less than 2 GiB; then weights go beside it


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
    path = Path(path)
    require_file_target(path, ".pt2", rb"PK\x03\x04")
    model = export_module(host, sample)
    set_evaluating(model)
    program = capture(model, sample, dynamic_batch)
    with writing(path, path) as file:
        torch.export.save(program, file)
        loaded = torch.export.load(file).module()
        outputs = (
            (run(model, inputs, evaluating=True), run(loaded, inputs, evaluating=False))
            for inputs in batches(sample, dynamic_batch)
        )
        difference = largest_difference(model, "The saved program", outputs)
    return Written(path, difference)


def export_onnx(
    host: SlottedModel, sample: Sample, path: str | Path, *, dynamic_batch: bool = True
) -> Written:
    """Write the committed network in eval mode as an ONNX file, for any runtime that reads it.

    Inputs and outputs are the tensors of the sample and of the network's output, in order;
    `dynamic_batch` is as in `export_program`. Above 2 GB the weights are in a second file beside
    it. The file is run through onnxruntime on the CPU and compared within 1e-5 before it gets
    its name; the largest difference is returned.
    """
    path = Path(path)
    _require_packages()
    require_file_target(path, ".onnx", rb"\x08.\x12\x07pytorch")
    model, sample, program = captured_on_cpu(host, sample, dynamic_batch)
    with (
        failing("The network cannot be converted to ONNX", fix="export_program has no such limit"),
        _quiet(),
    ):
        onnx = torch.onnx.export(program, dynamo=True, verbose=False)
    assert onnx is not None
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    with writing(path, path) as file:
        onnx.save(file, external_data=weights > SINGLE_FILE_BYTES)
        infer = _session(file)
        outputs = (
            (_tensors_in(run(model, inputs, evaluating=True)), infer(inputs))
            for inputs in batches(sample, dynamic_batch)
        )
        difference = largest_difference(model, "The ONNX file", outputs)
    return Written(path, difference)


def _session(file: Path) -> Callable[[Sample], list[Tensor]]:
    """An ONNX file as a function from a sample to its outputs."""
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def infer(inputs: Sample) -> list[Tensor]:
        arrays = [tensor.detach().numpy() for tensor in _tensors_in(arguments_of(inputs))]
        returned = session.run(None, dict(zip(names, arrays, strict=True)))
        return [torch.from_numpy(array) for array in returned]

    return infer


def _tensors_in(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _require_packages() -> None:
    for name in ONNX_PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ExportError(
                "Export to ONNX needs packages that are not installed",
                given=f"no {name}",
                valid=", ".join(ONNX_PACKAGES),
                fix="pip install 'esper-ml[export]'",
            ) from error


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


# --- capturing -------------------------------------------------------------------------------


def captured_on_cpu(
    host: SlottedModel, sample: Sample, dynamic_batch: bool
) -> tuple[nn.Module, Sample, ExportedProgram]:
    """The committed network in eval mode, the sample and the network's graph, all on the CPU."""
    model = export_module(host, sample).cpu()
    set_evaluating(model)
    sample = tree_map_only(Tensor, Tensor.cpu, sample)
    return model, sample, capture(model, sample, dynamic_batch)


def capture(model: nn.Module, sample: Sample, dynamic_batch: bool) -> ExportedProgram:
    args, kwargs = copied(sample)
    shapes = None
    if dynamic_batch:
        batch, size = Dim("batch"), _batch(sample)
        named = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        shapes = tree_map(lambda leaf: {0: batch} if _varies(leaf, size) else None, dict(named))
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


def batches(sample: Sample, dynamic_batch: bool) -> Iterator[Sample]:
    """The sample and, if the batch may vary, the sample twice over in one batch."""
    yield sample
    if dynamic_batch:
        size = _batch(sample)
        yield tree_map(lambda leaf: torch.cat([leaf] * 2) if _varies(leaf, size) else leaf, sample)


def _batch(sample: Sample) -> int:
    """The length of the first input's first axis."""
    size = batch_size(sample)
    if size is None or size < 2:
        raise ExportError(
            "The sample does not show what may vary with the batch",
            given="no input with an axis" if size is None else f"a batch of {size}",
            valid="a batch of 2 or more",
            fix="give a larger sample, or dynamic_batch=False",
        )
    return size


def _varies(value: object, batch: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch
