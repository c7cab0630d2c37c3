"""Runs a model on a sample and watches every module: what passes, and where gradients come back.

The model, the sample and all random states are afterwards as they were before.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from esper.kasmina.isolation import randomness_kept, state_kept
from esper.kasmina.slot import Part, part_of, replace_part
from esper.leyline.errors import SlotError

Sample = Tensor | Sequence[Any] | Mapping[str, Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# A module under watch, and what says which part of its output is meant or raises if none can be.
Watched = tuple[nn.Module, Callable[[object], Part]]


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module while the model ran on the sample."""

    module: nn.Module
    inputs: tuple[object, ...]
    output: object
    named_inputs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """One call of a watched module."""

    event: int  # its index in the run's events
    part: Part
    output: Tensor
    marker: Tensor  # added to the output, to see whether gradients come back to it
    records_gradients: bool


@dataclass(frozen=True)
class Run:
    """What was seen while the model ran."""

    events: list[ModuleCall]
    calls: dict[int, list[Call]]  # of each watched module
    reached: set[int]  # ids of the tensors that receive gradient from the model's output
    returned: list[Tensor]  # in the model's output
    refused: dict[int, SlotError]  # by watched module: its output has no part that could be meant
    training: bool

    def brings_gradients(self, watched: int) -> bool:
        """To a watched module's output; taken for granted when the model returns no tensors."""
        calls = self.calls[watched]
        return any(id(c.marker) in self.reached or not self.returned for c in calls)


def arguments_of(sample: Sample) -> Arguments:
    """One tensor, positional or keyword arguments: as a model takes them."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return tuple(sample) if isinstance(sample, (tuple, list)) else (sample,), {}


def call(model: nn.Module, sample: Sample) -> object:
    """The model's output on a sample."""
    args, kwargs = arguments_of(sample)
    return model(*args, **kwargs)


def watch(
    model: nn.Module, places: Mapping[int, Watched], sample: Sample, *, training: bool
) -> Run:
    """Run the model, all of it in training or in evaluation mode."""
    events: list[ModuleCall] = []
    calls: dict[int, list[Call]] = {index: [] for index in places}
    refused: dict[int, SlotError] = {}
    watched: dict[int, list[int]] = {}  # by module
    marked: dict[tuple[int, int], Tensor] = {}  # markers by the tensor that they were added to
    for index, (module, _) in places.items():
        watched.setdefault(id(module), []).append(index)

    def note(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object
    ) -> object:
        for index in watched.get(id(module), ()):
            try:
                part = places[index][1](output)
            except SlotError as error:  # not raised here, where the model's code could catch it
                refused.setdefault(index, error)
                continue
            tensor: Tensor = part_of(output, part)
            if _state(tensor) not in marked:  # by the last child, whose output a container returns
                dtype, device = tensor.dtype, tensor.device
                marker = torch.zeros((), dtype=dtype, device=device, requires_grad=True)
                tensor = tensor + marker
                marked[_state(tensor)] = marker
                output = replace_part(output, part, tensor)
            marker = marked[_state(tensor)]
            calls[index].append(Call(len(events), part, tensor, marker, torch.is_grad_enabled()))
        events.append(ModuleCall(module, args, output, kwargs))
        return output

    def own(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    compiles = "torch._dynamo" in sys.modules
    with (
        state_kept(model),
        randomness_kept(model),
        # Compiled parts of the model run as they were written, so that hooks see all.
        torch.compiler.set_stance("force_eager") if compiles else nullcontext(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        args, kwargs = tree_map_only(Tensor, own, arguments_of(sample))
        hookable = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        handles = [module.register_forward_hook(note, with_kwargs=True) for module in hookable]
        try:
            for module in hookable:
                module.training = training
            output = model(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
    tensors = list(_tensors_in(output))
    return Run(events, calls, _leaves_behind(tensors), tensors, refused, training)


def _state(tensor: Tensor) -> tuple[int, int]:
    """Which tensor it is, and how often it was changed: what works in place returns another."""
    return id(tensor), 0 if tensor.is_inference() else tensor._version


def _tensors_in(output: object) -> Iterator[Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):  # a class of the model's own that holds its outputs
            yield from (value for value in tree_leaves(vars(leaf)) if isinstance(value, Tensor))


def _leaves_behind(tensors: Sequence[Tensor]) -> set[int]:
    """The ids of all tensors that would receive gradient from these."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen: set[object] = set()
    leaves: set[int] = set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            leaves.add(id(getattr(node, "variable", None)))
            waiting += [before for before, _ in node.next_functions if before is not None]
    return leaves
