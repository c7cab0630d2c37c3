"""A seed, and the slot in a running model that lets it act on the activations that pass."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from enum import IntEnum
from typing import Any, Self
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from esper.kasmina.blueprints import Blueprint
from esper.kasmina.isolation import randomness_kept, state_kept
from esper.leyline import Blend, BlueprintError, SlotError, SlotSpec
from esper.leyline.streams import derive_seed

Part = int | str | None  # which of the tensors that a module returns; None: it returns one


class BlendGate(nn.Module):
    """A learned factor at each position, 2 * sigmoid(w . h + b): 1 when new, between 0 and 2.

    It sees one position at a time, so it is causal and fits every layout.
    """

    def __init__(self, channels: int, channel_axis: int) -> None:
        super().__init__()
        self.channel_axis = channel_axis
        self.weight = nn.Parameter(torch.zeros(channels))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        score = h.movedim(self.channel_axis, -1) @ self.weight + self.bias
        return 2.0 * torch.sigmoid(score).unsqueeze(self.channel_axis)


class Seed(nn.Module):
    """g in h + alpha * g(h), in the host's own layout."""

    def __init__(
        self, spec: SlotSpec, body: nn.Module, gate: BlendGate | None, draws: bool, fixed: bool
    ) -> None:
        super().__init__()
        self.body = body
        self.gate = gate
        self.draws = draws  # random numbers, for dropout say
        self.fixed_extent = fixed  # do its weights depend on the slot's extent?
        straight = spec.to_canonical == tuple(range(len(spec.to_canonical)))
        self.permutation = None if straight else (spec.to_canonical, spec.from_canonical)

    def forward(self, h: Tensor) -> Tensor:
        if self.permutation is not None:
            h = h.permute(self.permutation[0])
        g: Tensor = self.body(h)
        if self.gate is not None:
            g = g * self.gate(h)
        if self.permutation is not None:
            g = g.permute(self.permutation[1])
        return g


def build_seed(plan: Blueprint, spec: SlotSpec, blend: Blend, stream: int) -> Seed:
    """A newborn seed, checked to be exactly nothing.

    It is drawn on the CPU from its own stream, so that planting leaves the host's random
    numbers alone and gives the same seed on every device.
    """
    with torch.device("cpu"), randomness_kept(stream=derive_seed(stream, "weights")):
        body = plan.build(spec)
        h = torch.randn(spec.canonical_shape(batch=2))
        before = torch.get_rng_state()
        with state_kept(body), torch.no_grad():
            output = body(h)
        draws = not torch.equal(before, torch.get_rng_state())
    if bool((output != 0).any()):  # also true of NaN
        raise BlueprintError(
            f"Blueprint {plan.name!r} is not zero when it is new",
            given=f"outputs up to {float(output.abs().max()):.3g}",
            valid="exactly 0 everywhere",
            fix="end it with zeroed(layer) and nothing after, or with a ScalarGate",
        )
    gate = BlendGate(spec.channels, spec.channel_axis) if blend is Blend.GATE else None
    return Seed(spec, body, gate, draws, plan.fixed_extent)


class Mode(IntEnum):
    OFF = 0  # h passes untouched: the same tensor, not h + 0
    STRAIGHT = 1  # h passes untouched, the seed receives the gradient that h receives
    ON = 2  # h + alpha * g(h)


class _StraightThrough(torch.autograd.Function):
    """Forward: h, to the bit. Backward: the same gradient to h and to g."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h: Tensor, g: Tensor) -> Tensor:
        return h.clone()  # a copy, so that in-place layers behind the slot stay legal

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.g_dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.to(ctx.g_dtype)


class GrowthLostWarning(UserWarning):
    """Something that has grown, or what is remembered of it, is left out."""


class Bond:
    """Between the slots in a model and the host that owns them.

    A copy of the model alone has slots too, but no host: their bond is cut.
    """

    def __init__(self, tied: bool = False) -> None:
        self.tied = tied
        self.whole = False  # is the host itself being read, or does the model hold its slots?
        self._said: set[str] = set()

    def tie(self) -> None:
        self.tied = True

    @contextmanager
    def reading_all(self) -> Iterator[None]:
        before, self.whole = self.whole, True
        try:
            yield
        finally:
            self.whole = before

    def carry(self) -> None:
        """The model that carries the slots has them as a part, so its state lacks nothing."""
        self.whole = True

    def __reduce__(self) -> "tuple[type[Bond], tuple[()]]":
        return Bond, ()  # a copy, until a host that was copied along ties it

    def say_lost(self, what: str, fix: str) -> None:
        """Once."""
        if what not in self._said:
            self._said.add(what)
            warnings.warn(f"{what}; {fix}.", GrowthLostWarning, stacklevel=2)


class Slot(nn.Module):
    """Holds the seed that lives at one place of a model, and applies it according to its mode."""

    _original: "ReferenceType[Slot] | None" = None  # the slot of which this is a deep copy

    def __init__(self, spec: SlotSpec, bond: Bond | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.bond = bond or Bond()
        self.mode = Mode.OFF
        self.seed: Seed | None = None
        self.alpha = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        twin._original = ref(self)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_original": None}  # weak references cannot be pickled

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Return the modules in this slot, as `nn.Module.named_modules` does.

        Warns if this slot belongs to the copy in an `AveragedModel` and the seed of the original
        slot has changed since. `AveragedModel.update_parameters` matches parameters by position
        and stops at the end of the shorter list, so it would leave out new seeds silently. It
        traverses its own parameters first, and `memo` then contains the `AveragedModel`.
        """
        if memo and self._differs_from_original():
            for module in memo:
                if isinstance(module, AveragedModel) and self in module.module.modules():
                    self.bond.say_lost(
                        "Seeds have changed since the AveragedModel of this network was made, so "
                        "the average leaves them out",
                        "keep the average with esper.ema(host, decay), which includes new seeds",
                    )
        modules: Iterator[tuple[str, nn.Module]]
        modules = super().named_modules(memo, prefix, remove_duplicate)
        return modules

    def _differs_from_original(self) -> bool:
        original = self._original() if self._original is not None else None
        return original is not None and self._seed_layout() != original._seed_layout()

    def _seed_layout(self) -> tuple[float, list[torch.Size]] | None:
        """Return the alpha and the shapes of the parameters of the seed, or None without a seed."""
        if self.seed is None:
            return None
        return self.alpha, [parameter.shape for parameter in self.seed.parameters()]

    def switch(self, alpha: float, *, straight: bool = False) -> None:
        """Let the seed act at this alpha or, if `straight`, learn while h passes untouched."""
        self.alpha = alpha
        silent = alpha == 0.0 or self.seed is None
        self.mode = Mode.STRAIGHT if straight else Mode.OFF if silent else Mode.ON

    def forward(self, h: Tensor) -> Tensor:
        if self.mode is Mode.OFF or self.seed is None:
            return h
        self._check(h, self.seed.fixed_extent)
        if self.mode is Mode.STRAIGHT:
            if not torch.is_grad_enabled():
                return h
            # A seed that draws random numbers must not take them from the host's stream.
            with randomness_kept(self.seed) if self.seed.draws else nullcontext():
                g = self._grown(self.seed, h.detach())
            straight: Tensor = _StraightThrough.apply(h, g)  # type: ignore[no-untyped-call]
            return straight
        g = self._grown(self.seed, h)
        # Under autocast g may come in another precision; the host keeps its own.
        return h + (g if self.alpha == 1.0 else self.alpha * g).to(h.dtype)

    def _grown(self, seed: Seed, h: Tensor) -> Tensor:
        """g(h), in the seed's own precision where a host mixes several (and autocast does not)."""
        if not torch.is_autocast_enabled(h.device.type):
            h = h.to(next((parameter.dtype for parameter in seed.parameters()), h.dtype))
        grown: Tensor = seed(h)
        return grown

    def _check(self, h: Tensor, fixed_extent: bool) -> None:
        if not isinstance(h, Tensor):
            raise SlotError(
                f"Slot {self.spec.name!r} met an output of another type",
                given=type(h).__name__,
                valid="a tensor, as for the sample",
                fix="name a submodule whose output always has the same form",
            )
        if h.is_nested:
            raise SlotError(
                f"Slot {self.spec.name!r} met a nested tensor, which a seed cannot grow on",
                fix="set use_nested_tensor = False on the nn.TransformerEncoder around it",
            )
        layout, axes = self.spec.layout, len(self.spec.to_canonical)
        wanted = f"{axes} axes with {self.spec.channels} channels at axis {layout.channel_axis}"
        fits = h.dim() == axes and h.shape[layout.channel_axis] == self.spec.channels
        if fixed_extent:
            wanted += f" and {list(self.spec.extent)} positions, as its seed needs"
            fits = fits and layout.extent(h.shape) == self.spec.extent
        if not fits:
            raise SlotError(
                f"Slot {self.spec.name!r} met activations of another shape",
                given=list(h.shape),
                valid=wanted,
                fix="wrap the model again with a sample like the data it is trained on",
            )


class Tap:
    """The forward hook that routes a module's output, or one part of it, through a slot.

    An object rather than a closure, so that deep copies of the model carry their own slot.
    """

    def __init__(self, slot: Slot, part: Part) -> None:
        self.slot = slot
        self.part = part

    def __call__(self, module: nn.Module, args: object, output: object) -> object:
        if self.slot.mode is Mode.OFF:
            return None
        loose = self.slot.mode is Mode.ON and not self.slot.bond.tied
        if loose and module.training and torch.is_grad_enabled():
            self.slot.bond.say_lost(
                "This copy of a grown model holds seeds that are none of its parameters, so no "
                "optimiser trains them",
                "copy the host (copy.deepcopy(host)), or train host.export()",
            )
        return replace_part(output, self.part, self.slot(part_of(output, self.part)))


class Keeper:
    """The hook that speaks up when a grown module is saved without the seed that acts on it."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def __call__(self, module: nn.Module, prefix: object, keep_vars: object) -> None:
        if self.slot.mode is Mode.ON and not self.slot.bond.whole:
            self.slot.bond.say_lost(
                "A grown model's state_dict() lacks what has grown in it",
                "take host.state_dict(), or that of host.export(), a plain module with everything",
            )


def part_of(output: object, part: Part) -> Any:
    if part is None:
        return output
    try:
        return output[part]  # type: ignore[index]
    except (TypeError, KeyError, IndexError):
        raise SlotError(
            "A slot's module changed the form of its output",
            given=type(output).__name__,
            valid=f"a tuple, list or dict with part {part!r}, as for the sample",
        ) from None


def replace_part(output: object, part: Part, value: object) -> object:
    """`output` with one part exchanged, of the same type, without touching the original."""
    if part is None:
        return value
    if isinstance(output, tuple):
        items: list[Any] = [value if i == part else item for i, item in enumerate(output)]
        make = getattr(output, "_make", type(output))  # named tuples have it; torch's own do not
        return make(items)
    changed: Any = copy(output)  # a list or dict, or a class of one's own derived from them
    changed[part] = value
    return changed


def set_tap(target: nn.Module, slot: Slot, part: Part, on: bool) -> None:
    """Install or take away the slot's hook. A slot that does nothing leaves no hook behind."""
    # Compiled code does not look at hooks by default, and would silently skip a new seed. The flag
    # is set, and code compiled without it dropped, once and only if torch.compile is used.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.config.skip_nnmodule_hook_guards:
        dynamo.config.skip_nnmodule_hook_guards = False
        dynamo.reset()
    if not on:
        untap(target, slot)
    elif not taps_on(target, slot):
        target.register_forward_hook(Tap(slot, part))
        target.register_state_dict_pre_hook(Keeper(slot))


def untap(module: nn.Module, slot: Slot | None = None) -> None:
    """Take away the hooks that tie a module to this slot, or to any."""
    for key in taps_on(module, slot):
        del module._forward_hooks[key]
    for key, hook in list(module._state_dict_pre_hooks.items()):
        if isinstance(hook, Keeper) and slot in (None, hook.slot):
            del module._state_dict_pre_hooks[key]


def taps_on(module: nn.Module, slot: Slot | None = None) -> list[int]:
    """The keys of the hooks that lead to this slot, or to any."""
    hooks = module._forward_hooks.items()
    return [key for key, hook in hooks if isinstance(hook, Tap) and slot in (None, hook.slot)]
