"""Tapes: a module as a list of layer operations, from which device source is written.

`record(module, shape)` walks a module as `stacked.stack` does: known layers and known ways to
compose them become operations on values, anything else is refused. Views (flatten, transpose) move
nothing. A tape knows when each of its values and gradients is needed, so they can share memory.

Shapes are of one sample: `C` channels, `L` positions of a line or a plane, `R` rows, `I`/`O` items
in and out of a row, `T` tokens, `K` taps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from esper.kasmina.blueprints import Attend, Replace, Rescale, ScalarGate, Transposed
from esper.kasmina.layers import NORM_EPSILON, ChannelNorm, GroupNorm, SelfAttention, TokenLinear
from esper.leyline.errors import BlueprintError

INPUT = 0  # the value that a tape is given
# Kinds whose backward does not need what they returned.
_LEAVES_OUTPUT = ("linear", "conv", "plane", "copy", "norm")


@dataclass(frozen=True)
class View:
    """A value as one layer sees it: a shape, and how far apart its neighbours are in memory."""

    value: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def plain(self) -> bool:
        return self.strides == _plain(self.shape)

    def turned(self) -> "View":
        return View(self.value, self.shape[::-1], self.strides[::-1])


@dataclass(frozen=True)
class Op:
    """One call of a layer, forward and backward."""

    kind: str
    sizes: str  # whole numbers, as the source has them
    inputs: tuple[int, ...]  # none: it changes its output in place
    output: int
    params: tuple[int | None, ...] = ()  # where weight and bias start in the row of parameters
    reads: tuple[int, ...] = ()  # values that its backward needs
    saved: int | None = None  # a value that it keeps for its backward
    constants: tuple[str, ...] = ()  # real numbers, as the source has them


@dataclass
class Tape:
    """Operations in order. Value 0 comes from outside, and so does the gradient of the last."""

    sizes: list[int]  # numbers of each value
    ops: list[Op] = field(default_factory=list)
    output: int = INPUT
    width: int = 0  # parameters so far
    pinned: set[int] = field(default_factory=lambda: {INPUT})  # may not be changed in place

    def value(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def parameters(self, *tensors: Tensor | None) -> tuple[int | None, ...]:
        """Where these start, in the order in which the module names them."""
        places: list[int | None] = []
        for tensor in tensors:
            places.append(None if tensor is None else self.width)
            self.width += 0 if tensor is None else tensor.numel()
        return tuple(places)

    def add(self, kind: str, sizes: str, *inputs: View, like: View, **more: object) -> View:
        """An operation whose output is a new value shaped as `like`."""
        output = View(self.value(math.prod(like.shape)), like.shape, like.strides)
        values = tuple(each.value for each in inputs)
        self.ops.append(Op(kind, sizes, values, output.value, **more))  # type: ignore[arg-type]
        return output

    def change(self, kind: str, x: View, *constants: float) -> View:
        """An operation in place, on a copy where others still need what is there."""
        size = self.sizes[x.value]
        fresh = self.ops and self.ops[-1].output == x.value
        if x.value in self.pinned or not fresh or self.ops[-1].kind not in _LEAVES_OUTPUT:
            x = self.add("copy", f"{size}", x, like=x)
        real = tuple(map(_real, constants))
        self.ops.append(Op(kind, f"{size}", (), x.value, reads=(x.value,), constants=real))
        return x


def record(module: nn.Module, shape: tuple[int, ...], *, overwritten: bool = True) -> Tape:
    """The tape of a module for samples of this shape.

    `overwritten`: others change its output, as a slot does when it adds it to what passes there.
    """
    tape = Tape([math.prod(shape)])
    end = _walk(tape, module, View(INPUT, shape, _plain(shape)))
    if not end.plain:
        raise _unknown(module, "its output is not laid out as its shape says")
    if end.value == INPUT or (overwritten and any(end.value in op.reads for op in tape.ops)):
        end = tape.add("copy", f"{math.prod(end.shape)}", end, like=end)
    tape.output = end.value
    expected = sum(parameter.numel() for parameter in module.parameters())
    if tape.width != expected:
        raise _unknown(module, f"{expected - tape.width} of its parameters have no layer")
    return tape


def _real(number: float) -> str:
    return f"real({number!r})"


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _unknown(module: nn.Module, why: str) -> BlueprintError:
    return BlueprintError(
        f"A {type(module).__name__} cannot be computed on chip",
        given=why,
        valid="a module made of " + ", ".join(sorted(kind.__name__ for kind in _FORMS)),
        fix='choose backend="fused"',
    )


def _walk(tape: Tape, module: nn.Module, x: View) -> View:
    form = _FORMS.get(type(module))
    if form is None:
        raise _unknown(module, f"no chip form is known for {type(module).__qualname__}")
    return form(tape, module, x)


# --- layers ---------------------------------------------------------------------------------------


def _linear(tape: Tape, module: nn.Linear, x: View) -> View:
    return _rows_to_rows(tape, x, module.out_features, module.weight, module.bias)


def _rows_to_rows(tape: Tape, x: View, returned: int, weight: Tensor, bias: Tensor | None) -> View:
    """[R, I] or [I] to [R, O] or [O]; the output keeps the order of the axes in memory."""
    R, given = math.prod(x.shape[:-1]), x.shape[-1]
    turned = len(x.shape) == 2 and x.strides[0] < x.strides[1]
    strides = (1, R) if turned else _plain((*x.shape[:-1], returned))
    like = View(x.value, (*x.shape[:-1], returned), strides)
    row = (0, *x.strides)[-2], (0, *strides)[-2]
    sizes = f"{R}, {given}, {returned}, {row[0]}, {x.strides[-1]}, {row[1]}, {strides[-1]}"
    places = tape.parameters(weight, bias)
    return tape.add("linear", sizes, x, like=like, params=places, reads=(x.value,))


def _conv(tape: Tape, module: nn.Conv1d | nn.Conv2d, x: View) -> View:
    """Of a line, or of a plane as of a square."""
    ways = (module.kernel_size, module.stride, module.dilation, module.padding)
    zeros = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    alike = zeros and module.dilation[0] == 1 and all(len(set(way)) == 1 for way in ways)
    if not alike or not x.plain:
        raise _unknown(module, f"{module} on strides {x.strides}")
    K, stride, _, pad = (int(way[0]) for way in ways)
    (C, *size), returned = x.shape, module.out_channels
    if K == stride == module.groups == 1 and pad == 0:
        row = View(x.value, (C, math.prod(size)), (math.prod(size), 1)).turned()
        value = _rows_to_rows(tape, row, returned, module.weight, module.bias).value
        return View(value, (returned, *size), _plain((returned, *size)))
    made = [(each + 2 * pad - K) // stride + 1 for each in size]
    numbers = (C, *size, returned, K, *made, stride, pad, module.groups)
    like = View(x.value, (returned, *made), _plain((returned, *made)))
    kind, sizes = "plane" if made[1:] else "conv", ", ".join(map(str, numbers))
    places = tape.parameters(module.weight, module.bias)
    return tape.add(kind, sizes, x, like=like, params=places, reads=(x.value,))


def _gelu(tape: Tape, module: nn.GELU, x: View) -> View:
    if module.approximate != "none":
        raise _unknown(module, f"{module}")
    return tape.add("gelu", f"{tape.sizes[x.value]}", x, like=x, reads=(x.value,))


def _scalar_gate(tape: Tape, module: ScalarGate, x: View) -> View:
    places, size = tape.parameters(module.weight), f"{tape.sizes[x.value]}"
    return tape.add("scalar", size, x, like=x, params=places, reads=(x.value,))


def _norm(tape: Tape, module: ChannelNorm | GroupNorm, x: View) -> View:
    if isinstance(module, GroupNorm):
        C, L, G = x.shape[0], math.prod(x.shape[1:]), module.groups
        channel, position, part = x.strides[0], x.strides[-1], C // G
        R, numbers = G, f"{part}, {L}, {part}, {part * channel}, {channel}, {position}"
    else:
        R, (row, item) = math.prod(x.shape[:-1]), (0, *x.strides)[-2:]
        numbers = f"{x.shape[-1]}, 1, 0, {row}, {item}, 0"
    places, saved = tape.parameters(module.weight, module.bias), tape.value(2 * R)
    more = {"params": places, "reads": (x.value,), "saved": saved}
    real = (_real(NORM_EPSILON),)
    return tape.add("norm", f"{R}, {numbers}", x, like=x, constants=real, **more)


def _pool(tape: Tape, module: nn.Module, x: View) -> View:
    if module.output_size not in (1, (1,), (1, 1)) or not x.plain:
        raise _unknown(module, f"{module} on strides {x.strides}")
    C, L = x.shape[0], math.prod(x.shape[1:])
    like = View(x.value, (C, *(1 for _ in x.shape[1:])), (1,) * len(x.shape))
    if not isinstance(module, nn.AdaptiveMaxPool1d):
        return tape.add("mean", f"{C}, {L}", x, like=like)
    # Its backward looks for the input that is the output, which is the value to come.
    return tape.add("max", f"{C}, {L}", x, like=like, reads=(x.value, len(tape.sizes)))


def _reshaped(tape: Tape, module: nn.Flatten | nn.Unflatten, x: View) -> View:
    if not x.plain:
        raise _unknown(module, f"strides {x.strides}")
    whole = (math.prod(x.shape),)
    if isinstance(module, nn.Flatten):
        return View(x.value, whole, (1,))
    (size,) = x.shape
    shape = tuple(int(each) for each in module.unflattened_size)
    if math.prod(shape) != size:
        raise _unknown(module, f"{size} numbers as {list(shape)}")
    return View(x.value, shape, _plain(shape))


# --- modules of several parts ---------------------------------------------------------------------


def _sequential(tape: Tape, module: nn.Sequential, x: View) -> View:
    for part in module:
        x = _walk(tape, part, x)
    return x


def _replace(tape: Tape, module: Replace, h: View) -> View:
    tape.pinned.add(h.value)
    y = _walk(tape, module.transform, h)
    if y.strides != h.strides:
        raise _unknown(module, f"strides {h.strides} become {y.strides}")
    apart = tape.add("minus", f"{tape.sizes[h.value]}", y, h, like=h)
    return _walk(tape, module.gate, apart)


def _rescale(tape: Tape, module: Rescale, h: View) -> View:
    tape.pinned.add(h.value)
    s = tape.change("tanh", _walk(tape, module.strength, h))
    C, L = h.shape[0], math.prod(h.shape[1:])
    if not h.plain or tape.sizes[s.value] != C:
        raise _unknown(module, f"{list(s.shape)} scales {list(h.shape)}")
    return tape.add("channels", f"{C}, {L}", h, s, like=h, reads=(h.value, s.value))


def _self_attention(tape: Tape, module: SelfAttention, x: View) -> View:
    tape.pinned.add(x.value)
    q, k, v = (_walk(tape, part, x) for part in (module.query, module.key, module.value))
    T, inner = q.shape
    head = inner // module.heads
    sizes = f"{T}, {module.heads}, {head}, {module.causal:d}, {q.strides[0]}, {q.strides[1]}"
    saved = tape.value(module.heads * T)
    reads = (q.value, k.value, v.value, len(tape.sizes))  # and its output, the value to come
    more = {"reads": reads, "saved": saved, "constants": (_real(module.scale),)}
    seen = tape.add("attend", sizes, q, k, v, like=q, **more)
    return _walk(tape, module.out, seen)


_FORMS: dict[type[nn.Module], Callable[..., View]] = {
    nn.Linear: _linear,
    TokenLinear: _linear,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.ReLU: lambda tape, module, x: tape.change("leaky", x, 0.0),
    nn.LeakyReLU: lambda tape, module, x: tape.change("leaky", x, float(module.negative_slope)),
    nn.Tanh: lambda tape, module, x: tape.change("tanh", x),
    nn.GELU: _gelu,
    nn.AdaptiveAvgPool1d: _pool,
    nn.AdaptiveAvgPool2d: _pool,
    nn.AdaptiveMaxPool1d: _pool,
    nn.Flatten: _reshaped,
    nn.Unflatten: _reshaped,
    nn.Identity: lambda tape, module, x: x,
    nn.Sequential: _sequential,
    ScalarGate: _scalar_gate,
    ChannelNorm: _norm,
    GroupNorm: _norm,
    Replace: _replace,
    Rescale: _rescale,
    Transposed: lambda tape, module, x: _walk(tape, module.body, x.turned()).turned(),
    Attend: lambda tape, module, h: _walk(tape, module.attention, _walk(tape, module.norm, h)),
    SelfAttention: _self_attention,
}


# --- memory ---------------------------------------------------------------------------------------

Buffer = tuple[str, int]  # "value" or "gradient", and of which value


class Places(dict[Buffer, int]):
    """Where the values and gradients of a tape are, in numbers of one sample."""

    size: int


def lay_out(tape: Tape) -> Places:
    """Buffers that are never needed at the same time share memory; the input's are elsewhere.

    Forward takes the moments from 0 on. At the one after it the host's next segment is passed back,
    which reads the output; at the next a gate is; then the tape's own operations are, last first.
    """
    outside = len(tape.ops)
    spans: dict[Buffer, list[int]] = {}

    def needed(buffer: Buffer, moment: int) -> None:
        spans.setdefault(buffer, [moment, moment])[1] = moment

    for moment, op in enumerate(tape.ops):
        for value in (*op.inputs, op.output, op.saved):
            if value is not None:
                needed(("value", value), moment)
    needed(("value", tape.output), outside + 1)
    needed(("gradient", tape.output), outside + 1)
    for number, op in enumerate(reversed(tape.ops)):
        moment = outside + 2 + number
        for value in (*op.reads, op.saved):
            if value is not None:
                needed(("value", value), moment)
        for value in (op.output, *op.inputs):
            needed(("gradient", value), moment)
    places = Places()
    taken: list[Buffer] = []
    inside = [buffer for buffer in spans if buffer[1] != INPUT]
    for buffer in sorted(inside, key=lambda each: (-tape.sizes[each[1]], spans[each])):
        begin, end = spans[buffer]
        size, start = tape.sizes[buffer[1]], 0
        for low, high in sorted(
            (places[other], places[other] + tape.sizes[other[1]])
            for other in taken
            if spans[other][0] <= end and begin <= spans[other][1]
        ):
            if low - start >= size:
                break
            start = max(start, high)
        places[buffer] = start
        taken.append(buffer)
    places.size = max((places[buffer] + tape.sizes[buffer[1]] for buffer in taken), default=0)
    return places
