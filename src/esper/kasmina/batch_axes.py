"""Which axes of activations follow the batch: a model runs once more, on a batch of another size.

A positional embedding, for one, returns [T, C] whatever the batch is; nothing in the shape tells
that from a batch of T vectors, least of all where batch and length are the same.

Shapes: `B` batch, `C` channels, `T` tokens.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from esper.kasmina.layout import Axes, Event, first_tensor, is_batch_first
from esper.kasmina.watching import Run, Sample, Watched, watch


def axes_that_follow(
    model: nn.Module, places: Sequence[Watched], sample: Sample, run: Run
) -> list[list[Axes] | None]:
    """By watched module and call: the axes whose size follows the batch; None: it is not known.

    The batch is the sample's first axis, unless recurrent or attention modules show that this is
    the time: then the second.
    """
    for axis in (0, 1):
        other = _resized(sample, axis)
        if other is None:
            break
        try:
            again = watch(model, places, other, training=run.training)
        except Exception:  # the user's code; it may take batches of this size only
            break
        is_batch = _batch_changed(run, again)
        if is_batch is None:  # nobody tells, so what comes out must show it
            is_batch = axis == 0 and _first_axis_changed(run.returned, again.returned)
        if is_batch:
            pairs = zip(run.calls, again.calls, strict=True)
            return [_moved([c.output for c in a], [c.output for c in b]) for a, b in pairs]
    return [None for _ in places]


def batch_size(sample: Sample, axis: int = 0) -> int | None:
    """The size of this axis of the first tensor in the sample that has axes."""
    values = dict(sample) if isinstance(sample, Mapping) else sample
    tensors = (value for value in tree_leaves(values) if isinstance(value, Tensor))
    first = next((tensor for tensor in tensors if tensor.dim() > 0), None)
    return None if first is None or first.dim() <= axis else first.shape[axis]


def _resized(sample: Sample, axis: int) -> Sample | None:
    """With one entry fewer along an axis, or one more where hardly any would be left."""
    size = batch_size(sample, axis)
    if not size:
        return None
    wanted = torch.arange(size - 1 if size > 2 else size + 1) % size

    def resize(tensor: Tensor) -> Tensor:
        varies = tensor.dim() > axis and tensor.shape[axis] == size
        return tensor.index_select(axis, wanted.to(tensor.device)) if varies else tensor

    plain = dict(sample) if isinstance(sample, Mapping) else sample
    resized: Sample = tree_map_only(Tensor, resize, plain)
    return resized


def _batch_changed(run: Run, again: Run) -> bool | None:
    """What modules say that know their batch axis; False: it was the time. None: none says."""
    seen: dict[int, list[Event]] = {}
    for event in again.events:
        seen.setdefault(id(event.module), []).append(event)
    changed: set[str] = set()
    for event in run.events:
        batch_first = is_batch_first(event.module)
        others = seen.get(id(event.module))
        if batch_first is None or not others:
            continue
        before, after = first_tensor(event.output), first_tensor(others.pop(0).output)
        if before is not None and after is not None and before.dim() == after.dim() == 3:
            names = ("batch", "time") if batch_first else ("time", "batch")
            pairs = zip(names, before.shape, after.shape, strict=False)
            changed |= {name for name, was, now in pairs if was != now}
    return "batch" in changed if changed else None


def _first_axis_changed(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    pairs = zip(before, after, strict=False)
    return any(a.shape[:1] != b.shape[:1] for a, b in pairs)


def _moved(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[Axes] | None:
    """The axes that changed, call by call; None if it was called otherwise."""
    if [each.dim() for each in before] != [each.dim() for each in after]:
        return None
    return [
        frozenset(axis for axis, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if a != b)
        for x, y in zip(before, after, strict=True)
    ]
