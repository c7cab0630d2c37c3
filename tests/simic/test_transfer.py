"""Tensors that travel together."""

import torch

from esper.simic.agent.transfer import packed, sent, unpacked


def test_what_is_packed_comes_out_as_it_went_in_whatever_the_types_and_shapes() -> None:
    tensors = {
        "flags": torch.rand(3, 5) < 0.5,
        "numbers": torch.randn(7, 2).t(),  # not contiguous
        "counts": torch.arange(11),
        "wide": torch.randn(1, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
    }
    row = packed(tensors)
    assert row.dtype == torch.uint8
    found = unpacked(row, tensors)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype
    tensors["counts"].zero_()  # the packed row is a copy
    assert int(found["counts"].sum()) == sum(range(11))


def test_nothing_is_packed_on_the_way_to_the_same_kind_of_device() -> None:
    tensors = {"numbers": torch.randn(3)}
    assert sent(tensors, torch.device("cpu"))["numbers"] is tensors["numbers"]
