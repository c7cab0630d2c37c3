"""Infers how the activations at a place of a model are laid out, from the modules around it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from esper.leyline.errors import SlotError
from esper.leyline.slots import Layout

# Modules that tell how their output is laid out. Others (activations, dropout) keep what they get.
_CHANNELS_FIRST = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.GroupNorm,
    nn.Upsample,
)
_CHANNELS_LAST = (
    nn.Linear,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Embedding,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


_ELEMENTWISE = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.PReLU,
    nn.ELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Hardswish,
    nn.Identity,
    nn.modules.dropout._DropoutNd,
)


@dataclass(frozen=True)
class Event:
    """One call of a module while the model ran on the sample."""

    module: nn.Module
    inputs: tuple[object, ...]
    output: object


def infer_layout(where: str, output: Tensor, events: Sequence[Event], batch: int | None) -> Layout:
    """The layout of `output`, which the last of `events` returned; raises when it is uncertain."""
    shape = list(output.shape)
    if len(shape) == 2:
        return Layout.DENSE
    if len(shape) not in (3, 4):
        raise SlotError(
            f"{where.capitalize()} returns activations of {len(shape)} axes",
            given=shape,
            valid="2, 3 or 4 axes: [B, C], [B, C, L], [B, T, C], [B, C, H, W] or [B, H, W, C]",
        )
    witness = _witness(shape, events)
    if witness is None:
        raise SlotError(
            f"It is not certain which axis of {where} holds the channels",
            given=shape,
            valid=", ".join(layout.value for layout in Layout),
            fix="state the layout: Target(path, layout=...)",
        )
    if isinstance(witness, _CHANNELS_FIRST):
        return Layout.SEQUENCE if len(shape) == 3 else Layout.IMAGE
    if len(shape) == 4:
        return Layout.IMAGE_LAST
    return _order_of_tokens(where, shape, witness, events, batch)


def _shapes(event: Event) -> list[list[int]]:
    outputs = event.output if isinstance(event.output, (tuple, list)) else [event.output]
    return [list(item.shape) for item in outputs if isinstance(item, Tensor)]


def _witness(shape: list[int], events: Sequence[Event]) -> nn.Module | None:
    """The last module to return this very shape that tells how its output is laid out.

    If all axes but the batch are equal, a permutation since then would not show in the shape;
    then only modules count through which these very activations came unpermuted.
    """
    certain = len(set(shape[1:])) > 1
    trusted = _unpermuted_origins(events)
    for event in reversed(events):
        tells = isinstance(event.module, _CHANNELS_FIRST + _CHANNELS_LAST)
        if tells and shape in _shapes(event) and (certain or event in trusted):
            return event.module
    return None


def _unpermuted_origins(events: Sequence[Event]) -> list[Event]:
    """The last call and those whose very output reached it through elementwise modules only."""
    origins = [events[-1]]
    for event in reversed(events[:-1]):
        latest = origins[-1]
        unpacked = isinstance(latest.module, nn.Sequential) and event.output is latest.output
        passed = isinstance(latest.module, _ELEMENTWISE) and event.output is latest.inputs[0]
        if unpacked or passed:
            origins.append(event)
    return origins


def _batch_first(module: nn.Module) -> bool | None:
    """The module's own convention, when it has one."""
    attention = getattr(module, "self_attn", module)
    if isinstance(attention, (nn.RNNBase, nn.MultiheadAttention)):
        return bool(attention.batch_first)
    return None


def _order_of_tokens(
    where: str, shape: list[int], witness: nn.Module, events: Sequence[Event], batch: int | None
) -> Layout:
    """Batch first or time first: by the witness, else by recurrent and attention modules before
    it that work in the same order, else by the common convention of batch first."""
    own = _batch_first(witness)
    if own is not None:
        return Layout.TOKENS if own else Layout.TIME_FIRST
    nearest = next((e for e in reversed(events) if _batch_first(e.module) is not None), None)
    same_order = nearest is not None and any(o[:2] == shape[:2] for o in _shapes(nearest))
    if nearest is not None and not _batch_first(nearest.module):
        layout, certain = Layout.TIME_FIRST, same_order and shape[0] != shape[1]
    else:
        layout, certain = Layout.TOKENS, same_order or batch is None or shape[0] == batch
    if not certain:
        raise SlotError(
            f"It is not certain which axis of {where} is the batch",
            given=shape,
            fix="state the layout: Target(path, layout=Layout.TOKENS or Layout.TIME_FIRST)",
        )
    return layout
