"""Finds out, by running a model on a sample, what passes through the places named as slots.

A place is accepted when it is certain what a seed there would see and that it could learn;
otherwise it is refused with the reason and what to do instead.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from esper.kasmina.causality import Causality
from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.layout_inference import Axes, Evidence, axes_that_follow, batch_size, opening
from esper.kasmina.slot import Part, Slot, part_of, taps_on
from esper.kasmina.watching import ModuleCall, Run, Sample, Watched, watch
from esper.leyline.errors import EsperError, SlotError, UnknownNameError, first_line, require_known
from esper.leyline.slots import Layout, SlotSpec

__all__ = ["Place", "Sample", "Sighting", "Target", "probe", "survey"]

# By name, so that torch's distributed packages are not imported for the question.
_PARALLEL = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
_SHOWN_PATHS = 10
_ANOTHER = "name a submodule before it or inside it"  # as advice


@dataclass(frozen=True)
class Target:
    """A place for a slot: the output of the submodule at `path`.

    `part` picks from a tuple or dict output; `layout` states what could not be inferred.
    """

    path: str
    part: Part = None
    layout: Layout | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.layout is not None:
            require_known("layout", self.layout, [each.value for each in Layout])

    @classmethod
    def parse(cls, place: "Target | str") -> "Target":
        """A `Target`, or text: 'encoder.layer1', 'rnn@0' (part 0), 'trunk@features'."""
        if isinstance(place, Target):
            return place
        path, at, part = place.partition("@")
        number = part.lstrip("-").isdigit()
        return cls(path, int(part) if number else part if at else None)

    @property
    def slot_name(self) -> str:
        if self.name is not None:
            return self.name
        path = self.path or "output"
        return path if self.part is None else f"{path}@{self.part}"

    @property
    def where(self) -> str:
        return f"submodule {self.path!r}" if self.path else "the model itself"


@dataclass(frozen=True)
class Place:
    """A target that was found good: where to hook, what to pick, what passes there."""

    module: nn.Module
    part: Part
    spec: SlotSpec


@dataclass(frozen=True)
class Sighting:
    """What a survey says of one target: the place or why there is none, and when it is called."""

    target: Target
    place: Place | EsperError
    calls: int = 0
    first_event: int = -1  # orders the modules by when they are first done; -1: never called
    output: Tensor | None = None  # of the first call; two that are the same tensor are one place
    is_returned: bool = False  # as (part of) the model's own output


def probe(
    model: nn.Module, places: Sequence[Place | Target | str] | None, sample: Sample | None
) -> list[Place]:
    """The places that an Esper host announces, or the named ones of any model.

    What was not found before is described by running the model on the sample; raises with the
    reason if it is not good.
    """
    if isinstance(model, SegmentedHost) and places is None:
        require_slottable(model)
        specs = enumerate(model.slot_specs())
        return [Place(model.segments[index], None, spec) for index, spec in specs]
    if not places or sample is None:
        raise SlotError(
            "Slots on a model of your own need places and a sample",
            given=f"places {places}, {'a' if sample is not None else 'no'} sample",
            valid="submodule paths such as ['layer1', 'layer2'] and an input the model accepts",
        )
    targets = [Target.parse(place) for place in places if not isinstance(place, Place)]
    sightings = iter(survey(model, targets, sample) if targets else [])
    found: list[Place] = []
    for place in places:
        each = place if isinstance(place, Place) else next(sightings).place
        if isinstance(each, EsperError):
            raise each
        found.append(each)
    return found


def survey(model: nn.Module, targets: Sequence[Target], sample: Sample) -> list[Sighting]:
    """Run the model on the sample and say of each target what passes there or why it is refused.

    Raises only if nothing can be said of any: no slot fits this model, or it fails on the sample.
    """
    require_slottable(model)
    watched: dict[int, Watched] = {}
    refused: dict[int, EsperError] = {}
    for index, target in enumerate(targets):
        try:
            watched[index] = module_at(model, target.path), partial(_choose_part, target)
        except EsperError as refusal:
            refused[index] = refusal
    seen = _Survey(model, watched, sample)
    return [
        Sighting(target, refused[index]) if index in refused else seen.sighting(target, index)
        for index, target in enumerate(targets)
    ]


class _Survey:
    """The runs of a model under watch, and what they say of each watched module."""

    def __init__(self, model: nn.Module, watched: Mapping[int, Watched], sample: Sample) -> None:
        self._model = model
        self._watched = watched
        self._runs = _run(model, watched, sample) if watched else []
        self._batch = batch_size(sample)
        self._moved = {id(r): axes_that_follow(model, watched, sample, r) for r in self._runs}
        self._taken: dict[tuple[int, Part], Target] = {}
        self._causality = Causality(model, watched, sample, self._runs[0]) if self._runs else None

    def sighting(self, target: Target, index: int) -> Sighting:
        """What the runs say of the watched module `index`."""
        found: Place | EsperError
        try:
            found = self._place(target, index)
        except SlotError as refusal:
            found = refusal
        for run in self._runs:
            if calls := run.calls[index]:
                first = calls[0]
                returned = any(call.output is each for call in calls for each in run.returned)
                return Sighting(target, found, len(calls), first.event, first.output, returned)
        return Sighting(target, found)

    def _place(self, target: Target, index: int) -> Place:
        module, _ = self._watched[index]
        run = self._run_that_teaches(target, index)
        _require_no_nesting(self._model, target, run.events)
        part, spec = self._describe(target, run, index)
        first = self._taken.setdefault((id(module), part), target)
        if first is not target:
            raise SlotError(
                f"Slots {first.path!r} and {target.path!r} are the same module",
                given=type(module).__name__,
                fix="a shared module carries one slot; keep one of the two paths",
            )
        return Place(module, part, spec)

    def _run_that_teaches(self, target: Target, index: int) -> Run:
        """The run in which a seed at this place would have received gradient."""
        for run in self._runs:
            if index in run.refused:
                raise run.refused[index]
        calls = [call for run in self._runs for call in run.calls[index]]
        if not calls:
            raise SlotError(
                f"A slot on {target.where} would do nothing: the model does not call it on the "
                "sample",
                given=f"path {target.path!r}",
                fix="name a submodule whose forward is called",
            )
        for run in self._runs:
            if run.brings_gradients(index):
                return run
        if not any(tensor.requires_grad for run in self._runs for tensor in run.returned):
            reason = "nothing that the model returns has a gradient"
            fix = "let the model return what its loss is computed from, its logits say"
        elif any(call.records_gradients for call in calls):
            reason = "its output does not reach the model's output"
            fix = "name a submodule whose output is used and not detached"
        else:
            reason = "the model runs it without gradients"
            fix = "run it outside torch.no_grad(), or with checkpoint(..., use_reentrant=False)"
        raise SlotError(
            f"A seed on {target.where} would never learn: {reason}",
            given=f"path {target.path!r}",
            fix=fix,
        )

    def _describe(self, target: Target, run: Run, index: int) -> tuple[Part, SlotSpec]:
        where, calls = target.where, run.calls[index]
        outputs = [call.output for call in calls]
        if len({(call.part, call.output.dim()) for call in calls}) > 1:
            _refuse_different(where, "shapes", outputs)
        moved: Sequence[Axes | None] = self._moved[id(run)][index] or [None] * len(calls)
        layouts = {
            target.layout
            or Evidence(where, call.output, run.events, call.event, self._batch, axes).layout()
            for call, axes in zip(calls, moved, strict=True)
        }
        if len(layouts) > 1:
            _refuse_different(where, "layouts", outputs)
        name, layout = target.slot_name, Layout(layouts.pop())
        if layout.channel_axis >= outputs[0].dim():
            shape = list(outputs[0].shape)
            raise SlotError(
                f"Slot {name!r} is not laid out as {layout.value}",
                given=shape,
                fix="leave the layout out, or state one of as many axes",
            )
        channels = {output.shape[layout.channel_axis] for output in outputs}
        if len(channels) > 1:
            _refuse_different(where, "widths", outputs)
        extents = zip(*(layout.extent(output.shape) for output in outputs), strict=True)
        extent = tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in extents)
        spec = SlotSpec(name=name, layout=layout, channels=channels.pop(), extent=extent)
        assert self._causality is not None
        return calls[0].part, replace(spec, reach=self._causality.reach(where, index, spec))


def _run(model: nn.Module, watched: Mapping[int, Watched], sample: Sample) -> list[Run]:
    """One run in evaluation mode, and one in training mode if that leaves a question.

    (Evaluation skips no layer by chance and takes a batch of one; but some parts of a model only
    run in training.)
    """
    runs: list[Run] = []
    failures: list[Exception] = []
    for training in (False, True):
        try:
            runs.append(watch(model, watched, sample, training=training))
        except Exception as error:  # the user's code; the other mode may still work
            failures.append(error)
        if runs and all(runs[-1].brings_gradients(index) for index in watched):
            break
    if not runs:
        raise SlotError(
            "The model fails on the sample",
            given=f"{type(failures[0]).__name__}: {first_line(failures[0])}",
            valid="a tensor, a tuple of positional or a dict of keyword arguments that it accepts",
            fix="give inputs of the weights' type, as in inputs.float()"
            if "dtype" in first_line(failures[0])
            else "give one batch of inputs, without targets unless the model takes them",
        ) from failures[0]
    return runs


def _refuse_different(where: str, what: str, outputs: Sequence[Tensor]) -> None:
    raise SlotError(
        f"{opening(where)} is called with different {what}, so one seed cannot serve it",
        given=", ".join(str(list(output.shape)) for output in outputs),
        fix="give each use a module of its own, or name one whose output always has the same axes "
        "and channels",
    )


def _choose_part(target: Target, output: object) -> Part:
    """Which part of a module's output the slot serves: the only tensor, unless told."""
    part, chosen = target.part, [cast("Part", None)]
    refuse = partial(_refusal, opening(target.where))
    if isinstance(output, (tuple, list, dict)):
        parts = output.items() if isinstance(output, dict) else enumerate(output)
        tensors = [key for key, value in parts if isinstance(value, Tensor)]
        chosen = [key for key in tensors if part is None or str(key) == str(part)]
        if len(chosen) != 1:
            raise refuse(
                f"a {type(output).__name__}; say which tensor to grow",
                given="no part" if part is None else f"part {part!r}",
                valid=", ".join(f"@{key}" for key in tensors) or "it holds no tensor",
                fix=f"for example '{target.path}@{tensors[0]}'" if tensors else _ANOTHER,
            )
    elif not isinstance(output, Tensor):
        valid = "a tensor, or a tuple, list or dict that holds one"
        raise refuse("something a slot cannot serve", given=type(output).__name__, valid=valid)
    elif part is not None:
        what = "one tensor, so there are no parts to pick from"
        raise refuse(what, given=f"part {part!r}", fix="leave the part out")
    tensor: Tensor = part_of(output, chosen[0])
    if not tensor.is_floating_point():
        raise refuse("no floating-point activations", given=tensor.dtype, valid="a float tensor")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise refuse(f"a {kind} tensor", valid="a dense tensor")
    if tensor.numel() == 0:
        fix = _ANOTHER if len(tensor) else "give a larger sample"
        raise refuse("an empty tensor", given=list(tensor.shape), fix=fix)
    return chosen[0]


def _refusal(where: str, what: str, *, fix: str = _ANOTHER, **facts: Any) -> SlotError:
    return SlotError(f"{where} returns {what}", fix=fix, **facts)


def _require_no_nesting(model: nn.Module, target: Target, events: Sequence[ModuleCall]) -> None:
    """With a padding mask, torch's encoder runs its layers on nested tensors in evaluation."""
    steps = target.path.split(".")
    for depth in (depth for depth, step in enumerate(steps) if step == "layers"):
        path = ".".join(steps[:depth])
        module = model.get_submodule(path)
        if not isinstance(module, nn.TransformerEncoder):
            continue
        masked = any(
            (*event.inputs[2:3], event.named_inputs.get("src_key_padding_mask"))[0] is not None
            for event in events
            if event.module is module
        )
        if masked and module.use_nested_tensor:
            raise SlotError(
                f"{opening(target.where)} gets nested tensors in evaluation, which a seed "
                "cannot grow on",
                given=f"{path!r} with a padding mask and use_nested_tensor",
                fix=f"set model.{path}.use_nested_tensor = False".replace("..", "."),
            )


# --- models and submodules that cannot carry slots, whatever passes through them -------------


def require_slottable(model: nn.Module) -> None:
    """Raise if no submodule of this model can carry a slot."""
    if next(model.parameters(), None) is None:
        raise SlotError(
            "The model has no parameters, so there is nothing to grow",
            given=type(model).__name__,
            fix="attach slots to a model that is trained",
        )
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise SlotError(
            "The model has parameters without a shape",
            given=", ".join(lazy[:_SHOWN_PATHS]),
            fix="run the model once on the sample, so that its lazy modules get their sizes",
        )
    for name, module in model.named_modules():
        if isinstance(module, Slot) or taps_on(module):
            raise SlotError(
                "The model carries slots already",
                given=f"submodule {name!r}",
                fix="name all places when wrapping the model, and wrap it once",
            )


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The submodule at this path, if a hook on it would be honoured."""
    module, outer = model, ""
    _require_hooks_work(path, outer, module)
    for step in path.split(".") if path else ():
        child = module._modules.get(step)
        if child is None:
            known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
            near = difflib.get_close_matches(path, known, n=_SHOWN_PATHS, cutoff=0.0)
            raise UnknownNameError.of("submodule path", path, near)
        module, outer = child, f"{outer}.{step}".strip(".")
        _require_hooks_work(path, outer, module)
    return module


def _require_hooks_work(path: str, outer: str, module: nn.Module) -> None:
    given = f"{outer!r}, a {type(module).__name__}" if outer else f"a {type(module).__name__}"
    if isinstance(module, torch.jit.ScriptModule):
        kind, fix = "is TorchScript", "use the module it was scripted from"
    elif hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
        kind, fix = "is inside compiled code", "give it as it is, and compile what comes of it"
    elif any(each.__name__ in _PARALLEL for each in type(module).__mro__):
        kind = "is inside a parallel wrapper"
        fix = "attach slots to the model inside the wrapper (its .module)"
    elif isinstance(module, ParametrizationList):
        kind, fix = "computes a weight and no activations", "name the layer that has the weight"
    else:
        return
    where = f"Submodule {path!r}" if path else "The model"
    raise SlotError(f"{where} {kind}, which cannot carry slots", given=given, fix=fix)
