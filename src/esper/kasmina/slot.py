"""A slot in a running model: what it does to the activations that pass through it."""

import sys
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.seed import Seed
from esper.leyline.errors import SlotError
from esper.leyline.slots import SlotSpec


class Mode(IntEnum):
    OFF = 0  # h passes untouched: the same tensor, not h + 0
    STRAIGHT = 1  # h passes untouched, the seed receives the gradient that h receives
    ON = 2  # h + alpha * g(h)


class _StraightThrough(torch.autograd.Function):
    """Forward: h, to the bit. Backward: the same gradient to h and to g."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, g: Tensor) -> Tensor:
        ctx.g_dtype = g.dtype
        return h.clone()  # a copy, so that in-place layers behind the slot stay legal

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.to(ctx.g_dtype)


class Slot(nn.Module):
    """Holds the seed that lives at one place of a model, and applies it according to its mode."""

    def __init__(self, spec: SlotSpec) -> None:
        super().__init__()
        self.spec = spec
        self.mode = Mode.OFF
        self.seed: Seed | None = None
        self.alpha = 0.0

    def forward(self, h: Tensor) -> Tensor:
        if self.mode is Mode.OFF or self.seed is None:
            return h
        self._check(h)
        if self.mode is Mode.STRAIGHT:
            if not torch.is_grad_enabled():
                return h
            straight: Tensor = _StraightThrough.apply(  # type: ignore[no-untyped-call]
                h, self.seed(h.detach())
            )
            return straight
        g: Tensor = self.seed(h)
        # Under autocast g may come in another precision; the host keeps its own.
        return h + (g if self.alpha == 1.0 else self.alpha * g).to(h.dtype)

    def _check(self, h: Tensor) -> None:
        axes = len(self.spec.to_canonical)
        channels = self.spec.to_canonical[self.spec.channel_axis]
        if h.dim() != axes or h.shape[channels] != self.spec.channels:
            raise SlotError(
                f"Slot {self.spec.name!r} met activations of another shape",
                given=list(h.shape),
                valid=f"{axes} axes with {self.spec.channels} channels at axis {channels}",
                fix="wrap the model again with a sample like the data it is trained on",
            )


class Tap:
    """The forward hook that routes a module's output, or one part of it, through a slot.

    An object rather than a closure, so that deep copies of the model carry their own slot.
    """

    def __init__(self, slot: Slot, part: int | str | None) -> None:
        self.slot = slot
        self.part = part

    def __call__(self, module: nn.Module, args: object, output: object) -> object:
        if self.slot.mode is Mode.OFF:
            return None
        return replace_part(output, self.part, self.slot(part_of(output, self.part)))


def part_of(output: object, part: int | str | None) -> Any:
    return output if part is None else output[part]  # type: ignore[index]


def replace_part(output: object, part: int | str | None, value: object) -> object:
    """`output` with one part exchanged, of the same type, without touching the original."""
    if part is None:
        return value
    if isinstance(output, tuple):
        items: list[Any] = [value if i == part else item for i, item in enumerate(output)]
        named = hasattr(output, "_fields")
        return type(output)(*items) if named else tuple(items)
    if isinstance(output, list):
        return [value if index == part else item for index, item in enumerate(output)]
    if isinstance(output, dict):
        changed = type(output)(output)
        changed[part] = value
        return changed
    raise SlotError(
        "A slot's module changed the type of its output",
        given=type(output).__name__,
        valid="the tuple, list or dict it returned for the sample",
    )


def _make_compiled_code_notice_hooks() -> None:
    """Compiled code does not look at hooks by default, and would silently skip a new seed.

    The flag is set, and code compiled without it dropped, once and only if torch.compile is used.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.config.skip_nnmodule_hook_guards:
        dynamo.config.skip_nnmodule_hook_guards = False
        dynamo.reset()


def set_tap(target: nn.Module, slot: Slot, part: int | str | None, on: bool) -> None:
    """Install or take away the slot's hook. A slot that does nothing leaves no hook behind."""
    _make_compiled_code_notice_hooks()
    hooks = target._forward_hooks
    mine = [key for key, hook in hooks.items() if isinstance(hook, Tap) and hook.slot is slot]
    if on and not mine:
        target.register_forward_hook(Tap(slot, part))
    elif not on:
        for key in mine:
            del hooks[key]
