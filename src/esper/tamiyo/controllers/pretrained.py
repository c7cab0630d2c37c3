"""Trained controllers as directories: a network, what it was trained for, and its card.

    controller/
      manifest.json                action space, sizes, slots, blueprints, card
      tensors-<hash>.safetensors   the network with its normalisers

`tamiyo` is the one that comes with Esper.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from esper.archive import ArchiveError, kind_of, read_archive, write_archive
from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.errors import EsperError
from esper.leyline.heads import ActionSpace
from esper.tamiyo.controllers.learned import LearnedController
from esper.tamiyo.network import FactoredRecurrentActorCritic

KIND, VERSION = "esper controller", 1
SHIPPED = Path(__file__).parents[1] / "data" / "tamiyo"

Card = Mapping[str, Any]  # whatever JSON can hold: contexts, cost, scores, limits


@dataclass(frozen=True)
class Kept:
    """What a directory holds beside the weights."""

    network: FactoredRecurrentActorCritic
    slots: tuple[str, ...]
    blueprints: tuple[str, ...]
    card: Card


def keep_controller(
    network: FactoredRecurrentActorCritic, path: Path, catalogue: BlueprintCatalogue, card: Card
) -> Path:
    """Write a trained network as a controller for hosts with this catalogue's blueprints."""
    notes = {
        "space": asdict(network.space),
        "state_dim": network.state_dim,
        "lstm_hidden_dim": network.lstm_hidden_dim,
        "lstm_layers": network.lstm_layers,
        "slots": list(catalogue.slots.names),
        "blueprints": list(catalogue.names),
        "card": dict(card),
    }
    return write_archive(
        path, kind=KIND, version=VERSION, tensors=network.state_dict(), notes=notes
    )


def read_kept(path: Path) -> Kept:
    """A kept network; refused if it is damaged or does not fit its own description."""
    archive = read_archive(path, kind=KIND, version=VERSION)
    notes = archive.notes
    try:
        sizes = [notes[name] for name in ("state_dim", "lstm_hidden_dim", "lstm_layers")]
        mean = archive.tensors["observation_norm.mean"]
        space, card = ActionSpace.from_dict(notes["space"]), dict(notes["card"])
        memory = archive.tensors["lstm.weight_hh_l0"].shape  # [4 * hidden, hidden]
        layers = sum(name.startswith("lstm.weight_hh_l") for name in archive.tensors)
        told = (mean.shape, memory, layers)
        if not all(type(size) is int for size in sizes) or told != (
            (sizes[0],),
            (4 * sizes[1], sizes[1]),
            sizes[2],
        ):
            raise ValueError(f"sizes {sizes}")
        network = FactoredRecurrentActorCritic(space, *sizes)
        ours = {name: tensor.shape for name, tensor in network.state_dict().items()}
        stored = {name: tensor.shape for name, tensor in archive.tensors.items()}
        if ours != stored:
            wrong = sorted(name for name, _ in ours.items() ^ stored.items())
            raise ValueError(f"other tensors: {', '.join(wrong[:3])}")
        network.load_state_dict(dict(archive.tensors))
        slots, blueprints = (tuple(map(str, notes[name])) for name in ("slots", "blueprints"))
        if (len(slots), len(blueprints)) != (space.size("slot"), space.size("blueprint")):
            raise ValueError(f"{len(slots)} slots, {len(blueprints)} blueprints")
    except (LookupError, TypeError, ValueError, RuntimeError, EsperError) as error:
        raise ArchiveError(f"{path} does not describe a controller", given=error) from error
    return Kept(network.eval(), slots, blueprints, card)


def is_kept(path: Path) -> bool:
    return kind_of(path) == KIND


def kept_controller(path: Path, name: str) -> LearnedController:
    """The controller in a directory, under that name; it decides greedily."""
    kept = read_kept(path)
    return LearnedController(kept.network, name=name, blueprints=kept.blueprints)


@lru_cache
def shipped() -> Kept:
    """The controller that comes with Esper."""
    return read_kept(SHIPPED)


@dataclass(frozen=True)
class ShippedSettings:
    """There is nothing to set."""


def shipped_controller(settings: ShippedSettings | None = None) -> LearnedController:
    """Tamiyo, as it was trained on the garden; `shipped().card` says what it can do."""
    kept = shipped()
    return LearnedController(deepcopy(kept.network), blueprints=kept.blueprints)
