"""Which of the possible places `slots="auto"` takes.

Up to three, in the order in which the model runs them: the first, the last and the middle one of

- the repeated blocks of the model (modules with parameters and parts of their own, side by side
  in an `nn.Sequential` or `nn.ModuleList`), if there are at least two; else
- its activation functions and its blocks; else
- any place at all.

Not among them: what the model returns (a seed there would edit its logits), modules that run
more than once in a pass, places without a fitting blueprint, and, of places with the same
activations, all but one. Esper's own hosts announce their slots; those are taken as they are.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.layout_inference import opening
from esper.kasmina.probe import Place, Sample, Sighting, Target, survey
from esper.leyline.constants import DEFAULT_SLOT_COUNT
from esper.leyline.errors import EsperError, SlotError

_SHOWN_REASONS = 3
_ACTIVATIONS = nn.ReLU.__module__
_NOT_ACTIVATIONS = (nn.MultiheadAttention, nn.Softmax, nn.LogSoftmax, nn.Softmax2d, nn.Softmin)


Refusals = dict[Target, EsperError]


def auto_places(
    model: nn.Module, sample: Sample, sightings: Sequence[Sighting], refusals: Refusals
) -> list[Target]:
    """The targets to take of these, which are in the order of their calls.

    Seen with fewer neighbours a place may be doubtful: then the next. Why others are not taken is
    added to `refusals`.
    """
    if isinstance(model, SegmentedHost):
        return [sighting.target for sighting in sightings]
    useful = [each for each in sightings if not _refused(each, refusals)]
    while chosen := _choice(model, useful):
        again = survey(model, chosen, sample)
        if not [each for each in again if _refused(each, refusals)]:
            return chosen
        useful = [each for each in useful if each.target not in refusals]
    return []


def _refused(sighting: Sighting, refusals: Refusals) -> bool:
    """Is this no place for "auto"? Then `refusals` says why."""
    found, where = sighting.place, opening(sighting.target.where)
    if isinstance(found, EsperError):
        refusals[sighting.target] = found
    elif sighting.is_returned:
        refusals[sighting.target] = SlotError(f"{where} gives what the model returns")
    elif sighting.calls > 1:
        refusals[sighting.target] = SlotError(f"{where} runs more than once in a pass")
    return sighting.target in refusals


def no_place(model: nn.Module, refusals: Mapping[Target, EsperError]) -> SlotError:
    """What to say where nothing is left: the reasons by how many places they concern."""
    alike: dict[str, list[EsperError]] = {}
    for target, refusal in refusals.items():
        alike.setdefault(refusal.what.replace(repr(target.path), ""), []).append(refusal)
    groups = sorted(alike.values(), key=len, reverse=True)
    reasons = [
        first.what + (f" (and {len(others)} more like it)" if others else "")
        for first, *others in groups[:_SHOWN_REASONS]
    ]
    advice = [groups[0][0].fix] if groups else []
    return SlotError(
        "No place was found where this model could grow",
        given="; ".join([type(model).__name__, *reasons]),
        fix="; ".join([*filter(None, advice), "print(esper.inspect(model, sample)) shows every "
                       "place; name some with slots=[...]"]),
    )  # fmt: skip


def _choice(
    model: nn.Module, sound: Sequence[Sighting], most: int = DEFAULT_SLOT_COUNT
) -> list[Target]:
    sound = _distinct(model, sound)
    blocks = [each for each in sound if _is_block(model, each)]
    if len(blocks) >= 2:
        return _spread(blocks, most)
    lively = [each for each in sound if each in blocks or _is_activation(each)]
    return _spread(lively or sound, most)


def _distinct(model: nn.Module, sightings: Sequence[Sighting]) -> list[Sighting]:
    """One for each tensor: the block that returns it, else the module that made it."""
    found: dict[int, Sighting] = {}
    for sighting in sightings:
        if id(sighting.output) not in found or _is_block(model, sighting):
            found[id(sighting.output)] = sighting
    return sorted(found.values(), key=lambda each: each.first_event)


def _is_block(model: nn.Module, sighting: Sighting) -> bool:
    parent = model.get_submodule(sighting.target.path.rpartition(".")[0])
    module = model.get_submodule(sighting.target.path)
    has_parts = next(module.children(), None) is not None
    learns = next(module.parameters(), None) is not None
    return has_parts and learns and isinstance(parent, (nn.Sequential, nn.ModuleList))


def _is_activation(sighting: Sighting) -> bool:
    assert isinstance(sighting.place, Place)
    module = sighting.place.module
    return type(module).__module__ == _ACTIVATIONS and not isinstance(module, _NOT_ACTIVATIONS)


def _spread(sightings: Sequence[Sighting], most: int) -> list[Target]:
    """The first, the last, and others evenly between them."""
    if len(sightings) <= most:
        return [each.target for each in sightings]
    last = len(sightings) - 1
    return [sightings[round(step * last / (most - 1))].target for step in range(most)]
