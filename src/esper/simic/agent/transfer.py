"""Tensors on their way between devices: all of them together, without waiting."""

from collections.abc import Mapping

import torch
from torch import Tensor


def sent(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors on `device`.

    From the CPU to a GPU they go in one transfer through pinned memory, which is not waited for.
    Packing copies them, so their source may be overwritten at once; the pinned copy lives until
    the transfer is done.
    """
    if device.type != "cuda" or any(tensor.is_cuda for tensor in tensors.values()):
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    return unpacked(packed(tensors, pin=True).to(device, non_blocking=True), tensors)


def packed(tensors: Mapping[str, Tensor], pin: bool = False) -> Tensor:
    """One row of bytes; the widest types come first, so that each begins where it may."""
    parts = [tensors[name].contiguous().view(-1).view(torch.uint8) for name in _order(tensors)]
    size = sum(len(part) for part in parts)
    return torch.cat(parts, out=torch.empty(size, dtype=torch.uint8, pin_memory=pin))


def unpacked(row: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of the bytes as the tensors that were packed, in their order."""
    order = _order(like)
    parts = row.split([like[name].nbytes for name in order])
    found = {
        name: part.view(like[name].dtype).view(like[name].shape)
        for name, part in zip(order, parts, strict=True)
    }
    return {name: found[name] for name in like}


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    return sorted(tensors, key=lambda name: -tensors[name].element_size())
