"""Finds out which positions a seed may see: late inputs are changed, early outputs are watched.

A model is causal if it returns something for every position (one that pools them promises nothing)
and early outputs stay when late inputs change. Then no seed may carry anything from where late
inputs arrive, seen by what changes, to where early outputs come from, seen by gradients.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from esper.kasmina.layout_inference import batch_size, is_batch_first
from esper.kasmina.watching import Run, Sample, Watched, arguments_of, watch
from esper.leyline import Family, Reach, SlotError, SlotSpec

# Late inputs change something that the model returns, but nothing early. Do late outputs come from
# early inputs, or are positions merely apart? By place and call: what changes, what early read.
_Cut = tuple[bool, dict[int, list[tuple[Tensor, Tensor]]]]
NOISE = 1e-5  # of the largest difference: what sums in another order leave, as Fourier's do
_AWAKE = 0.1  # by how much weights that are all alike are moved


@dataclass(frozen=True)
class _Input:
    """One tensor of a sample, and an axis that may be its positions."""

    sample: Sample
    values: Tensor
    axis: int

    def changed(self, start: int, end: int | None) -> Sample:
        """The sample with other values at some positions, of the range that each has."""
        old, new = self.values, self.values.detach().clone()
        low, high = new.aminmax(dim=0)
        step = new.is_floating_point() or new.device.type == "cpu"  # else too much may be fatal
        spare = torch.where(low < high, high, torch.where(low > 0, low - 1, low + step))
        mirrored = low + high - new
        part = (slice(None),) * self.axis + (slice(start, end),)
        new[part] = torch.where(mirrored == new, spare, mirrored)[part]
        changed: Sample = tree_map_only(Tensor, lambda x: new if x is old else x, self.sample)
        return changed

    def outputs(self, run: Run | None) -> list[Tensor]:
        """What the model returned, also with positions apart that it has as rows of a batch."""
        every, sizes = run.returned if run else [], self.values.shape[:2]
        floats = [x for x in every if x.is_floating_point() and x.numel()]
        rows = [x for x in floats if x.dim() == 2 and len(x) == sizes.numel()]
        return floats + [x.unflatten(0, sizes) for x in rows]

    def early(self, run: Run, cut: int) -> Iterator[tuple[int, int, int]]:
        """Outputs and axes that could be the positions, with how many of them are early."""
        length = self.values.shape[self.axis]
        for index, output in enumerate(self.outputs(run)):
            for axis, count in enumerate(output.shape):
                early = cut * count // length
                if length % count and count % length:  # then both have the same end
                    early = cut - length + count if count <= length + 1 else 0
                # A picture is not smaller, and a row is no longer, than what it was made from.
                fits = count >= length if self.values.dim() > 3 else output.dim() > 2
                if 0 < early < count and (fits or count == length):
                    yield index, axis, early


class Causality:
    """What a model promises about positions, and what that leaves open to seeds."""

    def __init__(
        self, model: nn.Module, watched: Mapping[int, Watched], sample: Sample, run: Run
    ) -> None:
        self._model, self._watched, self._training = model, watched, run.training
        self._batch = batch_size(sample)
        self._goes_on = _goes_on(model, sample, run.events[-1].output)
        self._cuts: list[_Cut] = []
        time_first = any(is_batch_first(event.module) is False for event in run.events)
        base: Run | None = None
        with _awake(model):
            for given in _inputs(sample, 0 if time_first else 1):
                length = given.values.shape[given.axis]
                # A model that works in blocks may be causal only from one to the next.
                tried = (length // 2, 1 << (length - 1).bit_length() >> 1, length - 1)
                cuts = [cut for cut in dict.fromkeys(tried) if any(given.early(run, cut))]
                base = base or (self._run(sample) if cuts else None)
                found = (self._respected(given, cut, base) for cut in cuts if base)
                if (first := next(filter(None, found), None)) is not None:
                    self._cuts.append(first)

    def reach(self, where: str, index: int, spec: SlotSpec) -> Reach:
        """What a seed may see at a watched place; raises if no seed could keep the promise."""
        reaches = [Reach.ALL]
        for mixes, seen in self._cuts:
            # A place that only training comes by was not seen here.
            # Rows that are not the batch may be others each time, as those of experts are.
            own = spec.family is Family.DENSE and any(len(x) != self._batch for x, _ in seen[index])
            calls = [] if own else seen[index]
            reaches += [_left(where, mixes, spec, *each) for each in calls] or [Reach.OWN]
        found = max(reaches, key=list(Reach).index)
        return Reach.OWN if found is Reach.PAST and self._goes_on else found

    def _run(self, sample: Sample) -> Run | None:
        with suppress(Exception):  # the user's code; then this sample says nothing
            return watch(self._model, self._watched, sample, training=self._training)
        return None

    def _respected(self, given: _Input, at: int, base: Run) -> _Cut | None:
        outputs, other = given.outputs(base), self._run(given.changed(at, None))
        late = _differences(outputs, given.outputs(other))
        kept = [
            (index, axis, count)
            for index, axis, count in given.early(base, at)
            if late and late[index].any() and not late[index].narrow(axis, 0, count).any()
        ]
        if not kept or other is None:
            return None
        back = _differences(outputs, given.outputs(self._run(given.changed(0, at))))
        mixes = not back or any(bool(back[i].movedim(axis, 0)[n:].any()) for i, axis, n in kept)
        watched = {index: [call.output for call in each] for index, each in base.calls.items()}
        parts = [outputs[index].narrow(axis, 0, count) for index, axis, count in kept]
        slopes = _slopes(parts, [x for each in watched.values() for x in each])
        seen = {}
        for index, each in watched.items():
            changes = _differences(each, [call.output for call in other.calls[index]])
            reads = (_large(next(slopes)) for _ in each) if slopes else (~x for x in changes)
            seen[index] = list(zip(changes, list(reads), strict=False))
        return mixes, seen


def _left(where: str, mixes: bool, spec: SlotSpec, changes: Tensor, reads: Tensor) -> Reach:
    """What one call of a place leaves to seeds."""
    both = [each.permute(spec.to_canonical).any(spec.channel_axis) for each in (changes, reads)]
    late, early = (each.reshape(len(each), -1) for each in both)  # [B, positions]
    if not bool((late.any(1) & early.any(1)).any()):
        return Reach.ALL
    if bool((late & early).any()) and mixes:
        raise SlotError(
            f"A seed on {where} would let early outputs of the model depend on late inputs, since "
            "channels there hold several positions",
            given=f"{spec.layout.value} with {spec.channels} channels",
            fix="name a submodule whose output has the positions on an axis of their own",
        )
    if bool((late & early).any()) or spec.family is Family.CONV2D:
        return Reach.OWN if mixes else Reach.ALL
    not_before = late.int().cummax(1).values > 0  # the first late one
    return Reach.OWN if bool((not_before & early).any()) else Reach.PAST


def _slopes(parts: Sequence[Tensor], tensors: Sequence[Tensor]) -> Iterator[Tensor] | None:
    """How parts of outputs depend on tensors; None if nobody knows, as of cuDNN in evaluation."""
    own = [each if each.requires_grad else each.detach().requires_grad_() for each in tensors]
    weights = [part.detach().cos() for part in parts]
    with suppress(RuntimeError):
        found = torch.autograd.grad(parts, own, weights, retain_graph=True, allow_unused=True)
        return (torch.zeros_like(x) if g is None else g for x, g in zip(own, found, strict=True))
    return None


def _differences(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor]:
    """Where tensors differ, each from its counterpart; nothing if those have other shapes."""
    if [x.shape for x in before] != [x.shape for x in after]:
        return []
    pairs = zip(before, after, strict=True)
    return [_large(torch.where(a == b, 0.0, (a - b).float())) for a, b in pairs]


def _large(difference: Tensor) -> Tensor:
    size = difference.detach().abs().nan_to_num(nan=1.0)
    return size > NOISE * size.max()


def _inputs(sample: Sample, first_axis: int) -> Iterator[_Input]:
    """Tensors in a sample, by axis; of whole numbers those that have values to exchange."""
    plain = dict(sample) if isinstance(sample, Mapping) else sample
    for leaf, values in enumerate(tree_leaves(plain)):
        dense = isinstance(values, Tensor) and values.layout == torch.strided
        if not dense or values.is_nested or values.is_complex() or not values.numel():
            continue
        low, high = values.detach().aminmax()
        other = (low < high or leaf == 0) and values.dtype is not torch.bool
        if values.is_floating_point() or (low >= 0 and other):
            for axis in range(first_axis, values.dim()):
                yield _Input(plain, values, axis)


def _goes_on(model: nn.Module, sample: Sample, output: object) -> bool:
    """Does a model return a cache or state that it also takes, to go on from there?"""
    args, named = arguments_of(sample)
    taken = list(inspect.signature(model.forward).parameters.values())[len(args) :]
    free = {each.name for each in taken if each.default is None} - {*named}
    if isinstance(output, Mapping):
        return any(name in free for name in output)
    rest = tree_leaves(output[1:]) if isinstance(output, tuple) and free else []
    return any(isinstance(each, Tensor) and each.dim() > 1 for each in rest)


@contextmanager
def _awake(model: nn.Module) -> Iterator[None]:
    """Inside, weights that are all alike are not: a head of zeros, say, hides what it will read."""
    learning = (p.data for p in model.parameters() if p.requires_grad and p.numel())
    alike = [(w, w.clone()) for w in learning if bool((w == w.flatten()[0]).all())]
    try:
        for weights, _ in alike:
            weights += _AWAKE * torch.arange(weights.numel()).cos().view(weights.shape).to(weights)
        yield
    finally:
        for weights, before in alike:
            weights.copy_(before)
