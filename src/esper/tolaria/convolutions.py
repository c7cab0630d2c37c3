"""Convolutions of many networks with their own kernels, in the form that is fast where they run.

Measured on one CPU thread and on one H200 (benchmarks/population.py prints the totals): grouped
convolutions win on the CPU once there is more than one channel; a matrix product over unfolded
windows wins for a single channel, for kernels of one tap, and for small channels on a GPU.

Shapes: `N` networks, `B` batch, `C`/`O` channels in/out, `L` positions, `K` taps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def stacked_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int, padding: int, groups: int
) -> Tensor:
    """[N, B, C, L] with kernels [N, O, C/groups, K] to [N, B, O, L']."""
    channels, taps = x.shape[2], weight.shape[3]
    if groups == channels and channels > 1:
        return _depthwise1d(x, weight, bias, stride, padding)
    if groups == 1 and (x.is_cuda or channels == 1 or taps == 1):
        return _windows1d(x, weight, bias, stride, padding)
    return _grouped(x, weight, bias, stride, padding, groups)


def stacked_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int, padding: int, groups: int
) -> Tensor:
    """[N, B, C, H, W] with kernels [N, O, C/groups, K, K] to [N, B, O, H', W']."""
    if weight.shape[-1] == 1 and stride == 1 and padding == 0 and groups == 1:
        flat = _windows1d(x.flatten(3), weight.flatten(3), bias, 1, 0)
        return torch.unflatten(flat, 3, x.shape[3:])
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
    y = convolve(
        side_by_side,
        weight.flatten(0, 1),
        None if bias is None else bias.flatten(),
        stride=stride,
        padding=padding,
        groups=networks * groups,
    )
    return torch.unflatten(y, 1, (networks, -1)).transpose(0, 1)
