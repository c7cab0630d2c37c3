"""Gradient isolation: a pass in which chosen parameters learn and nothing else notices."""

import operator
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.leyline.errors import require_known

_CONTAINERS = {list, dict, set, deque, OrderedDict, defaultdict, Counter}
# Of what every module has, a pass may add to these three; the rest are hooks and flags.
_TORCHS_OWN = vars(nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}


class Isolation(StrEnum):
    """How a TRAINING seed learns while the host does not notice."""

    @classmethod
    def named(cls, name: str) -> "Isolation":
        require_known("isolation", str(name), [each.value for each in cls])
        return cls(name)

    DUAL_PASS = "dual_pass"  # a second pass with the seed on and everything else frozen
    STRAIGHT_THROUGH = "straight_through"  # in the host's own pass, from the gradient that h gets


@contextmanager
def randomness_kept(*modules: nn.Module, stream: int | None = None) -> Iterator[None]:
    """Random states are put back at the end: torch's on the CPU, on the modules' devices and in
    their attributes, numpy's and Python's. Inside, with `stream` given, all start from it.
    """
    generators: list[torch.Generator] = [torch.default_generator]
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    for device in sorted({tensor.device for tensor in tensors}, key=str):
        if device.type == "mps":
            generators.append(torch.mps._get_default_mps_generator())
        elif device.type not in ("cpu", "meta"):
            generators.append(torch.get_device_module(device).default_generators[device.index])
    for part in (part for module in modules for part in module.modules()):
        # torch's own isinstance is slow here, and this runs once in every step.
        generators += [value for value in vars(part).values() if type(value) is torch.Generator]
    torch_states = [generator.get_state() for generator in generators]
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        if stream is not None:
            # Not torch.manual_seed: it also reaches devices whose states are not kept here.
            for generator in generators:
                generator.manual_seed(stream)
            np.random.seed(stream % 2**32)
            random.seed(stream)
        yield
    finally:
        for generator, state in zip(generators, torch_states, strict=True):
            generator.set_state(state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


@contextmanager
def state_kept(*modules: nn.Module) -> Iterator[None]:
    """Whatever passes inside leave behind in the modules is undone: batch statistics and other
    buffers, tensors, lists, dicts and sets in attributes, what was set anew or added. What such a
    list holds is not looked into.
    """
    parts = [vars(part) for module in modules for part in module.modules()]
    tensors = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    contents: list[tuple[Any, Any]] = [(attributes, attributes.copy()) for attributes in parts]
    for attributes in parts:  # in every step, so there is no work for what torch itself has there
        for value in map(attributes.__getitem__, attributes.keys() - _TORCHS_OWN):
            kind = type(value)
            if kind in _CONTAINERS:
                contents.append((value, value.copy()))
            elif kind is Tensor and not value.requires_grad:
                tensors.append((value, value.clone()))
    try:
        yield
    finally:
        for now, kept in contents:  # each container is to hold what it held
            alike = isinstance(now, dict) and now.keys() == kept.keys()
            if not alike or not all(map(operator.is_, now.values(), kept.values())):
                now.clear()
                (now.update if isinstance(now, (dict, set)) else now.extend)(kept)
        for tensor, before in tensors:
            if tensor.shape == before.shape:
                tensor.data.copy_(before)  # `data`, since a graph that needs it may go on
            else:  # observers of quantisation resize theirs
                tensor.data = before
