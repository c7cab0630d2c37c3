"""The grown network as a file that other programs run: a `torch.export` archive, or ONNX."""

import importlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from esper.kasmina import export_files
from esper.kasmina.export_files import Written
from esper.kasmina.isolation import state_kept
from esper.kasmina.layout_inference import batch_size
from esper.kasmina.plain_module import export_module
from esper.kasmina.slotted import SlottedModel
from esper.kasmina.watching import Sample, arguments_of
from esper.leyline.errors import ExportError, install_hint

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


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
    export_files.require_file_target(path, ".pt2", rb"PK\x03\x04")
    model, sample, program = captured(host, sample, dynamic_batch, on_cpu=False)
    with export_files.writing(path, path) as file:
        torch.export.save(program, file)
        loaded = torch.export.load(file).module()
        outputs = (
            [export_files.run(each, inputs) for each in (model, loaded)]
            for inputs in batches(sample, dynamic_batch)
        )
        difference = export_files.largest_difference(model, "The saved program", outputs)
    return Written(path, difference)


def export_onnx(
    host: SlottedModel, sample: Sample, path: str | Path, *, dynamic_batch: bool = True
) -> Written:
    """Write the committed network in eval mode as an ONNX file, for any runtime that reads it.

    Inputs and outputs are the tensors of the sample and of the network's output, in order;
    `dynamic_batch` is as in `export_program`. Of a large network the weights are in a second file
    beside it. The file is run through onnxruntime on the CPU and compared within 1e-5 before it
    gets its name; the largest difference is returned.
    """
    path = Path(path)
    for name in ONNX_PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ExportError(
                "Export to ONNX needs packages that are not installed",
                given=f"no {name}",
                valid=", ".join(ONNX_PACKAGES),
                fix=install_hint("export"),
            ) from error
    export_files.require_file_target(path, ".onnx", rb"\x08.\x12\x07pytorch")
    model, sample, program = captured(host, sample, dynamic_batch)
    limit = "The network cannot be converted to ONNX"
    with export_files.failing(limit, fix="export_program has no such limit"), _quiet():
        onnx = torch.onnx.export(program, dynamo=True, verbose=False)
    assert onnx is not None
    with export_files.writing(path, path) as file:
        onnx.save(file)
        runtime = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.log_severity_level = 3  # errors
        session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        names = [each.name for each in session.get_inputs()]
        outputs = []
        for inputs in batches(sample, dynamic_batch):
            arrays = [tensor.detach().numpy() for tensor in _tensors_in(arguments_of(inputs))]
            returned = session.run(None, dict(zip(names, arrays, strict=True)))
            wanted = _tensors_in(export_files.run(model, inputs))
            outputs.append((wanted, [torch.from_numpy(array) for array in returned]))
        difference = export_files.largest_difference(model, "The ONNX file", outputs)
    return Written(path, difference)


def _tensors_in(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


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


def captured(
    host: SlottedModel, sample: Sample, dynamic_batch: bool, *, on_cpu: bool = True
) -> tuple[nn.Module, Sample, ExportedProgram]:
    """The committed network in eval mode, the sample and the network's graph."""
    model = export_module(host, sample)
    export_files.set_evaluating(model)
    if on_cpu:
        model, sample = model.cpu(), tree_map_only(Tensor, Tensor.cpu, sample)
    args, kwargs = export_files.copied(sample)
    forward = _spelled_out(model.forward, kwargs)
    shapes = None
    if dynamic_batch:
        batch, varies = Dim("batch"), _varying(sample)
        named = inspect.signature(forward).bind(*args, **kwargs).arguments
        shapes = tree_map(lambda leaf: {0: batch} if varies(leaf) else None, dict(named))
    try:
        with torch.no_grad(), state_kept(model), _quiet():
            vars(model)["forward"] = forward
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # the user's code, under a tracer
        reason, fix = export_files.origin_of(error), None
        if "data-dependent" in reason:
            fix = "where it branches on the values of a tensor, let torch.where choose"
        elif "not a known type" in reason:
            fix = (
                "return tensors in tuples, named tuples, lists or dicts (a model of transformers "
                'does if the sample has "use_cache": False)'
            )
        elif dynamic_batch:
            fix = (
                "if the batch is the reason, write x.shape[0] in place of len(x) in the model, or "
                "keep the sample's batch size with dynamic_batch=False"
            )
        what = "torch.export cannot capture the network"
        raise ExportError(what, given=reason, fix=fix) from error
    return model, sample, program


def _spelled_out(forward: Callable[..., Any], given: Iterable[str]) -> Callable[..., Any]:
    """`forward` with a parameter for each keyword that its `**` takes: torch.export needs them."""
    own = inspect.signature(forward)
    spelled: list[inspect.Parameter] = []
    for each in own.parameters.values():
        names = [each.name]
        if each.kind is each.VAR_KEYWORD:
            names = [name for name in given if name not in own.parameters]
            each = each.replace(kind=each.KEYWORD_ONLY)
        spelled += [each.replace(name=name) for name in names]

    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    vars(run)["__signature__"] = own.replace(parameters=spelled)
    return run


def batches(sample: Sample, dynamic_batch: bool) -> Iterator[Sample]:
    """The sample and, if the batch may vary, the sample twice over in one batch."""
    yield sample
    if dynamic_batch:
        varies = _varying(sample)
        yield tree_map(lambda leaf: torch.cat([leaf] * 2) if varies(leaf) else leaf, sample)


def _varying(sample: Sample) -> Callable[[object], bool]:
    """Says which inputs may vary with the batch, the length of the first input's first axis."""
    size = batch_size(sample)
    if size is None or size < 2:
        raise ExportError(
            "The sample does not show what may vary with the batch",
            given="no input with an axis" if size is None else f"a batch of {size}",
            valid="a batch of 2 or more",
            fix="give a larger sample, or dynamic_batch=False",
        )
    return lambda value: isinstance(value, Tensor) and value.shape[:1] == (size,)
