"""Infers how the activations at a place of a model are laid out, from the modules around it.

Some modules tell: a convolution has its channels at axis 1, a linear layer at the last one. What
they say of an activation counts for the place when it is the very same tensor, or when the shape
is the same and a permutation would show in it. Wherever that leaves a doubt, the place is refused.

Which axes follow the batch is seen by running the model once more, on a batch of another size: a
positional embedding, for one, returns [T, C] whatever the batch is, and nothing in the shape tells
that from a batch of T vectors, least of all where batch and length are the same.

Shapes: `B` batch, `C` channels, `L` positions, `T` tokens, `H` height, `W` width.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from esper.kasmina.watching import Call, ModuleCall, Run, Sample, Watched, arguments_of, watch
from esper.leyline import Layout, SlotError

Axes = frozenset[int]

FIRST, LAST = 1, -1  # where a module has its channels: behind the batch, or at the end

_POOLS = ("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool")
_KINDS = ("Conv", "ConvTranspose", "BatchNorm", "InstanceNorm", *_POOLS)
# Channels at axis 1, by the number of axes behind it.
_SPATIAL: dict[int, tuple[type[nn.Module], ...]] = {
    axes: tuple(getattr(nn, f"{kind}{axes}d") for kind in _KINDS) for axes in (1, 2)
}
_SPATIAL[2] += (nn.PixelShuffle,)
_ANY_SPATIAL = (nn.GroupNorm, nn.Upsample, nn.SyncBatchNorm)
_LAST = (
    nn.Linear,
    nn.Embedding,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.LayerNorm,
    nn.RMSNorm,
)
# What the modules above call the number of channels that they return.
_CHANNEL_COUNTS = {"out_channels", "num_features", "num_channels", "out_features"}
_CHANNEL_COUNTS |= {"embedding_dim", "embed_dim", "normalized_shape"}
_KEEPS_AXES = {nn.ReLU.__module__, nn.Dropout.__module__}  # the homes of activations and dropouts


def opening(where: str) -> str:
    """`where` as the start of a sentence; `capitalize` would also change the path's letters."""
    return where[0].upper() + where[1:]


@dataclass(frozen=True)
class Evidence:
    """All that is known of the activations at one place."""

    where: str
    output: Tensor
    events: Sequence[ModuleCall]
    call: int  # which of the events returned the output
    batch: int | None
    moved: Axes | None  # the axes that follow the batch, if that is known

    @cached_property
    def shape(self) -> list[int]:
        return list(self.output.shape)

    @cached_property
    def origins(self) -> list[ModuleCall]:
        """The calls, latest first, that the output comes from without a change of axes.

        That is: the same tensor, or one from which modules that keep the axes made it.
        """
        tensor: Tensor | None = self.output
        origins: list[ModuleCall] = []
        for event in reversed(self.events[: self.call + 1]):
            if tensor is None or first_tensor(event.output) is not tensor:
                continue
            origins.append(event)
            module = event.module
            keeps = type(module).__module__ in _KEEPS_AXES or isinstance(module, nn.Identity)
            if keeps and not isinstance(module, nn.MultiheadAttention):
                tensor = first_tensor(event.inputs)
        return origins

    def layout(self) -> Layout:
        """The layout of the output; raises when it is uncertain."""
        if len(self.shape) not in (2, 3, 4):
            raise SlotError(
                f"{opening(self.where)} returns activations of {len(self.shape)} axes",
                given=self.shape,
                valid="2, 3 or 4 axes: [B, C], [B, C, L], [B, T, C], [B, C, H, W] or [B, H, W, C]",
                fix="name a submodule whose output has them",
            )
        if self.moved is not None and not self.moved:
            raise self._not_of_the_batch()
        for event in self.origins:
            # Convolutions take a lone sample too; its channels would then pass for the batch.
            axes = _spatial_axes(event.module)
            if axes is None or len(self.shape) == axes + 2:
                continue
            pooled_features = len(self.shape) == 2 and axes == 1  # pools and norms take [B, C] too
            if isinstance(event.module, nn.modules.conv._ConvNd) or not pooled_features:
                raise SlotError(
                    f"{opening(self.where)} returns activations without a batch axis",
                    given=f"{self.shape} from {type(event.module).__name__}",
                    valid=f"{axes + 2} axes",
                    fix="give a sample with a batch axis, as in training, or name a submodule that "
                    "sees the whole batch",
                )
        if len(self.shape) == 2:
            layout = Layout.DENSE
        elif self._channel_axis() == FIRST:
            layout = Layout.SEQUENCE if len(self.shape) == 3 else Layout.IMAGE
        elif len(self.shape) == 3:
            layout = self._order_of_tokens()
        else:
            self._require_image()
            layout = Layout.IMAGE_LAST
        if self.moved is not None and layout.batch_axis not in self.moved:
            raise self._not_of_the_batch()
        return layout

    def _not_of_the_batch(self) -> SlotError:
        return SlotError(
            f"{opening(self.where)} does not return something for every sample: no axis that "
            "could be the batch follows it",
            given=self.shape if self.moved else f"{self.shape} for batches of different sizes",
            fix="name a submodule whose output has the batch as an axis",
        )

    def _channel_axis(self) -> int:
        for event in self.origins:
            if (own := _told_axis(event)) is not None:
                return own
        fitting = (event for event in self.events if self.shape in _shapes(event))
        alike = [e for e in fitting if _spatial_axes(e.module) in (None, len(self.shape) - 2)]
        axes = {axis for event in alike if (axis := _told_axis(event)) is not None}
        if len(self.shape) == 3 and self.shape[1] == self.shape[2]:
            reason = "a transposition would not show in its shape"
        elif not axes:
            reason = "no module around it tells"
        elif len(axes) > 1:
            reason = "modules around it disagree"
        else:
            return axes.pop()
        raise SlotError(
            f"It is not certain which axis of {self.where} holds the channels: {reason}",
            given=self.shape,
            valid=", ".join(layout.value for layout in Layout),
            fix="if it is one of these, state it: Target(path, layout=...)",
        )

    def _require_image(self) -> None:
        """Four axes with the channels last may also be heads of attention, [B, heads, T, C].

        So a module for images must have seen one of this size, or of a whole multiple of it.
        """
        _, height, width, _ = self.shape
        images = [event for event in self.events if _spatial_axes(event.module) == 2]
        sizes = [seen[2:] for event in images for seen in _shapes(event) if len(seen) == 4]
        times = [rows // height for rows, _ in sizes]
        if any(size == [height * n, width * n] for size, n in zip(sizes, times, strict=True)):
            return
        raise SlotError(
            f"It is not certain that {self.where} returns images",
            given=self.shape,
            fix="if they are [B, H, W, C], state it: Target(path, layout=Layout.IMAGE_LAST)",
        )

    def _order_of_tokens(self) -> Layout:
        """Batch first or time first: by a recurrent or attention module that the activations come
        from, else by all of those that see the same two sizes, else by the axis that follows the
        sample's batch, or is as long."""
        for event in self.origins:
            if (own := is_batch_first(event.module)) is not None:
                return Layout.TOKENS if own else Layout.TIME_FIRST
        layouts: set[Layout] = set()
        for event in self.events:
            own = is_batch_first(event.module)
            for shape in _shapes(event) if own is not None else ():
                batch_then_time = shape[:2] if own else shape[1::-1]
                if len(shape) == 3 and self.shape[:2] == batch_then_time:
                    layouts.add(Layout.TOKENS)
                if len(shape) == 3 and self.shape[:2] == batch_then_time[::-1]:
                    layouts.add(Layout.TIME_FIRST)
        if len(layouts) != 1 and self.moved is not None and len(self.moved & {0, 1}) == 1:
            return Layout.TOKENS if 0 in self.moved else Layout.TIME_FIRST
        if not layouts and self.shape[0] == self.batch and self.shape[0] != self.shape[1]:
            return Layout.TOKENS
        if len(layouts) != 1:
            fix = "state the layout: Target(path, layout=Layout.TOKENS or Layout.TIME_FIRST)"
            if self.shape[0] == self.shape[1]:
                fix += ", or give a sample whose batch and length differ"
            what = f"It is not certain which axis of {self.where} is the batch"
            raise SlotError(what, given=self.shape, fix=fix)
        return layouts.pop()


def first_tensor(values: object) -> Tensor | None:
    first = values[0] if isinstance(values, (tuple, list)) and values else values
    return first if isinstance(first, Tensor) else None


def _shapes(event: ModuleCall) -> Iterator[list[int]]:
    """Of what went in and what came out; only of the first tensor, which is what modules tell of.

    (The hidden state of a recurrent network, for one, has axes of its own.)
    """
    given = event.inputs or tuple(event.named_inputs.values())
    for tensor in (first_tensor(given), first_tensor(event.output)):
        if tensor is not None:
            yield list(tensor.shape)


def _spatial_axes(module: nn.Module) -> int | None:
    return next((count for count, kinds in _SPATIAL.items() if isinstance(module, kinds)), None)


def _told_axis(event: ModuleCall) -> int | None:
    """Where this module has its channels, if it is one that tells.

    A class derived from torch's may do otherwise, so the channels must really be there.
    """
    module, output = event.module, first_tensor(event.output)
    if output is None or output.dim() < 2:
        return None
    spatial = isinstance(module, (*_SPATIAL[1], *_SPATIAL[2], *_ANY_SPATIAL))
    if not spatial and not isinstance(module, _LAST):
        return None
    axis = FIRST if spatial else LAST
    channels = output.shape[axis]
    stated = [getattr(module, name) for name in _CHANNEL_COUNTS if hasattr(module, name)]
    # A norm over several axes has them in a tuple: it may as well be over [C, H, W].
    return axis if all(count in (channels, (channels,)) for count in stated) else None


def is_batch_first(module: nn.Module) -> bool | None:
    """The module's own convention, when it has one."""
    attention = module._modules.get("self_attn", module)  # asked of every module at every place
    if isinstance(attention, (nn.RNNBase, nn.MultiheadAttention)):
        return bool(attention.batch_first)
    return None


# --- axes that follow the batch --------------------------------------------------------------


def axes_that_follow(
    model: nn.Module, places: Mapping[int, Watched], sample: Sample, run: Run
) -> dict[int, list[Axes] | None]:
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
            pairs = zip(run.returned, again.returned, strict=False)
            is_batch = axis == 0 and any(a.shape[:1] != b.shape[:1] for a, b in pairs)
        if is_batch:
            return {index: _moved(run.calls[index], again.calls[index]) for index in places}
    return dict.fromkeys(places)


def batch_size(sample: Sample, axis: int = 0) -> int | None:
    """The size of this axis of the first tensor in the sample that has axes."""
    leaves = tree_leaves(arguments_of(sample))
    tensors = (value for value in leaves if isinstance(value, Tensor))
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
    seen: dict[int, list[ModuleCall]] = {}
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


def _moved(before: Sequence[Call], after: Sequence[Call]) -> list[Axes] | None:
    """The axes that changed, call by call; None if it was called otherwise."""
    if [call.output.dim() for call in before] != [call.output.dim() for call in after]:
        return None
    shapes = [(a.output.shape, b.output.shape) for a, b in zip(before, after, strict=True)]
    return [frozenset(axis for axis in range(len(x)) if x[axis] != y[axis]) for x, y in shapes]
