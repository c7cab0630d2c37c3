"""Stacked forms: one module's computation for many copies with their own weights, at once.

`stack(module)` turns a module written for one network into a function over stacked parameters
[N, ...] and activations [N, B, ...]. Known layers have a form that is fast where it runs; any other
module is fused by `vmap`. Every form is tested equal to its module, one copy after the other.

Shapes: `N` copies (networks), `B` batch, `C`/`O` channels in/out, `L` positions, `K` taps of a
kernel, `T` tokens, `I` features in.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints import Attend, Replace, Rescale, ScalarGate, Transposed
from esper.kasmina.layers import NORM_EPSILON, ChannelNorm, GroupNorm, SelfAttention, TokenLinear

Params = Mapping[str, Tensor]  # name -> [N, ...]
Form = Callable[[Params, Tensor], Tensor]  # stacked parameters, [N, B, ...] -> [N, B, ...]

Parts = Mapping[str, Form]  # forms of a module's children by name

_ELEMENTWISE = (nn.ReLU, nn.LeakyReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.Identity)


def stack(module: nn.Module, prefix: str = "") -> Form:
    """The stacked form of `module`, whose parameters are named with `prefix`."""
    if isinstance(module, _ELEMENTWISE):
        return lambda params, x: module(x)
    if isinstance(module, nn.AdaptiveMaxPool1d) and module.output_size == 1:
        return lambda params, x: _largest(x)
    if (layer := _LAYERS.get(type(module))) is not None and _is_usual(module):
        weight, bias = f"{prefix}weight", f"{prefix}bias"
        return lambda params, x: layer(module, x, params[weight], params.get(bias))
    if (compose := _COMPOSED.get(type(module))) is not None:
        children = module.named_children()
        parts = {name: stack(child, f"{prefix}{name}.") for name, child in children}
        return lambda params, x: compose(module, parts, params, x)
    if not any(True for _ in module.parameters()) and not any(True for _ in module.buffers()):
        # All copies do the same, so copies and batch may share one axis.
        return lambda params, x: torch.unflatten(module(x.flatten(0, 1)), 0, x.shape[:2])
    return _by_vmap(module, prefix)


def _is_usual(module: nn.Module) -> bool:
    """The stacked convolutions pad with zeros, alike in all directions, and do not dilate."""
    if not isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return True
    settings = (module.stride, module.padding, module.dilation)
    alike = all(not isinstance(each, str) and len(set(each)) == 1 for each in settings)
    return alike and module.dilation[0] == 1 and module.padding_mode == "zeros"


def _by_vmap(module: nn.Module, prefix: str) -> Form:
    names = {f"{prefix}{name}": name for name, _ in module.named_parameters()}

    def one(params: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(module, params, (x,))
        return y

    fused = torch.func.vmap(one)
    return lambda params, x: fused({name: params[full] for full, name in names.items()}, x)


# --- layers: given their own stacked weight and bias ----------------------------------------------


def _linear(module: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.flatten(1, -2)  # [N, B * ..., I]
    turned = weight.transpose(1, 2)
    y = torch.bmm(rows, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, turned)
    return torch.unflatten(y, 1, x.shape[1:-1])


def _largest(x: Tensor) -> Tensor:
    """The first of the largest numbers of a line; without gradients nobody asks for its place."""
    return x.max(-1, keepdim=True).values if x.requires_grad else x.amax(-1, keepdim=True)


def _channel_norm(module: ChannelNorm, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    wide = (x.shape[0], *(1,) * (x.dim() - 2), x.shape[-1])
    normal = (written_norm if x.is_cuda else library_norm)(x)
    return torch.addcmul(bias.reshape(wide), normal, weight.reshape(wide))


def library_norm(x: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the last axis."""
    return F.layer_norm(x, x.shape[-1:], eps=NORM_EPSILON)


def written_norm(x: Tensor) -> Tensor:
    """The same; the library's kernel gives a block of threads to a row, and rows have 8 numbers."""
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred * (variance + NORM_EPSILON).rsqrt()


def _group_norm(module: GroupNorm, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    merged = F.group_norm(x.flatten(0, 1), module.groups, eps=NORM_EPSILON)
    normal = torch.unflatten(merged, 0, x.shape[:2])
    return torch.addcmul(bias.unsqueeze(1), normal, weight.unsqueeze(1))


# --- modules of several parts: given the forms of their children and all parameters ---------------


def _sequential(module: nn.Sequential, parts: Parts, params: Params, x: Tensor) -> Tensor:
    for part in parts.values():
        x = part(params, x)
    return x


def _self_attention(module: SelfAttention, parts: Parts, params: Params, x: Tensor) -> Tensor:
    def by_head(name: str) -> Tensor:  # [N, B, H, T, D]
        return torch.unflatten(parts[name](params, x), -1, (module.heads, -1)).transpose(-3, -2)

    query = by_head("query") * module.scale
    scores = query @ by_head("key").transpose(-2, -1)
    if module.causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    seen = F.softmax(scores, dim=-1) @ by_head("value")
    return parts["out"](params, seen.transpose(-3, -2).flatten(-2))


# --- convolutions of many networks with their own kernels -----------------------------------------

# Measured on one CPU thread and on one H200 (benchmarks/population.py prints the totals): grouped
# convolutions win on the CPU once there is more than one channel; a matrix product over unfolded
# windows wins for a single channel, for kernels of one tap, and for small channels on a GPU.


def stacked_convolution(
    module: nn.Conv1d | nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """[N, B, C, L] with kernels [N, O, C/groups, K] to [N, B, O, L'], or the same in the plane."""
    stride, padding, groups = module.stride[0], int(module.padding[0]), module.groups
    channels, taps = x.shape[2], weight.shape[-1]
    if x.dim() == 5:
        if taps == 1 and stride == 1 and padding == 0 and groups == 1:
            flat = _windows1d(x.flatten(3), weight.flatten(3), bias, 1, 0)
            return torch.unflatten(flat, 3, x.shape[3:])
    elif groups == channels and channels > 1:
        return _depthwise1d(x, weight, bias, stride, padding)
    elif groups == 1 and (x.is_cuda or channels == 1 or taps == 1):
        return _windows1d(x, weight, bias, stride, padding)
    return _grouped(x, weight, bias, stride, padding, groups)


def _windows1d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """One matrix product a network: kernels [O, C * K] times windows [C * K, B * L']."""
    networks, batch = x.shape[:2]
    outputs, taps = weight.shape[1], weight.shape[3]
    turned = x.transpose(1, 2)  # [N, C, B, L]
    if taps > 1 or stride > 1:
        windows = F.pad(turned, (padding, padding)).unfold(-1, taps, stride)  # [N, C, B, L', K]
        length = windows.shape[3]
        columns = windows.permute(0, 1, 4, 2, 3).reshape(networks, -1, batch * length)
    else:
        length = x.shape[3]
        columns = turned.reshape(networks, -1, batch * length)
    kernels = weight.reshape(networks, outputs, -1)
    if bias is None:
        y = torch.bmm(kernels, columns)
    else:
        y = torch.baddbmm(bias.unsqueeze(2), kernels, columns)
    return torch.unflatten(y, 2, (batch, length)).transpose(1, 2)


def _depthwise1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int
) -> Tensor:
    """Each channel with its own kernel: a sum over the taps of shifted inputs."""
    taps = weight.shape[3]
    length = (x.shape[3] + 2 * padding - taps) // stride + 1
    padded = F.pad(x, (padding, padding))
    per_tap = weight[:, None, :, 0].unbind(-1)  # K x [N, 1, C]
    span = stride * (length - 1) + 1
    y = padded[..., :span:stride] * per_tap[0].unsqueeze(-1)
    for tap in range(1, taps):
        y = torch.addcmul(y, padded[..., tap : tap + span : stride], per_tap[tap].unsqueeze(-1))
    return y if bias is None else y + bias[:, None, :, None]


def _grouped(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, groups: int
) -> Tensor:
    """Networks side by side in the channel axis: one grouped convolution."""
    networks, batch, channels = x.shape[:3]
    side_by_side = x.transpose(0, 1).reshape(batch, networks * channels, *x.shape[3:])
    convolve = F.conv1d if x.dim() == 4 else F.conv2d
    bias = None if bias is None else bias.flatten()
    groups *= networks
    y = convolve(side_by_side, weight.flatten(0, 1), bias, stride, padding, groups=groups)
    return torch.unflatten(y, 1, (networks, -1)).transpose(0, 1)


# --- which module has which form ------------------------------------------------------------------

_LAYERS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    TokenLinear: _linear,
    nn.Conv1d: stacked_convolution,
    nn.Conv2d: stacked_convolution,
    ChannelNorm: _channel_norm,
    GroupNorm: _group_norm,
    ScalarGate: lambda _, x, weight, bias: x * weight.view(-1, *(1,) * (x.dim() - 1)),
}
_COMPOSED: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Sequential: _sequential,
    Replace: lambda _, parts, params, h: parts["gate"](params, parts["transform"](params, h) - h),
    Rescale: lambda _, parts, params, h: h * parts["strength"](params, h).tanh(),
    Transposed: lambda _, parts, params, h: parts["body"](params, h.transpose(2, -1)).transpose(
        2, -1
    ),
    Attend: lambda _, parts, params, h: parts["attention"](params, parts["norm"](params, h)),
    SelfAttention: _self_attention,
}
