"""Tamiyo: a trained network as a controller, and the directory in which one is kept.

    controller/
      manifest.json                action space, sizes, slots, blueprints, card
      tensors-<hash>.safetensors   the network with its normalisers

`tamiyo` is the one that comes with Esper.

Shapes: `N` rows, `F` features, `H` heads, `A` actions of the largest head.
"""

import hashlib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.archive import ArchiveError, kind_of, read_archive, write_archive
from esper.archive.tensors import not_finite
from esper.leyline import HEADS, Actions, ActionSpace, EsperError, Legality, require_agreement
from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.errors import ActionError
from esper.leyline.signals import Signals
from esper.tamiyo.choosing import Logits, MaskedCategorical, head_logits, logits_given
from esper.tamiyo.controllers.proposals import draw
from esper.tamiyo.controllers.protocol import Thoughts
from esper.tamiyo.features import FeatureTable, signals_to_features
from esper.tamiyo.network import FactoredRecurrentActorCritic, Hidden, RecurrentActorCritic


class LearnedController:
    """A trained network that decides and does not learn; it remembers through an episode.

    Greedy, or by chance: with the environments' own draws, so that a row's decisions do not
    depend on its neighbours. Worlds that are not a garden hand over their observations [N, F]
    in place of signals; chance is then torch's, from `generator`.
    """

    needs_contributions = True  # it was trained with them

    def __init__(
        self,
        network: RecurrentActorCritic,
        *,
        greedy: bool = True,
        name: str = "tamiyo",
        generator: torch.Generator | None = None,
        blueprints: tuple[str, ...] = (),
    ) -> None:
        """`blueprints`: those of the hosts it was trained on, if they are known."""
        self.network, self.greedy, self.name = network, greedy, name
        self.generator, self.blueprints = generator, blueprints
        self._hidden: Hidden | None = None
        # What the last decision saw, among what it chose, and what: kept, not computed.
        self._last: tuple[Tensor, Hidden | None, Tensor, Legality, Actions] | None = None

    @property
    def fingerprint(self) -> str:
        """A hash of the network: another training has another one."""
        found = hashlib.blake2b(f"greedy {self.greedy}".encode(), digest_size=6)
        for name, tensor in sorted(self.network.state_dict().items()):
            found.update(name.encode())
            found.update(tensor.cpu().contiguous().numpy().tobytes())
        return found.hexdigest()

    def memory(self) -> dict[str, Tensor]:
        return {} if self._hidden is None else dict(zip("hc", self._hidden, strict=True))

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        device = self.network.return_scale.device
        self._hidden = (memory["h"].to(device), memory["c"].to(device)) if memory else None

    def require_possible(self, catalogue: BlueprintCatalogue, horizon: int) -> None:
        """Refuse hosts with other slots or blueprints than it was trained on."""
        ours, theirs = self.network.space, HEADS.resolve(catalogue)
        for what, left, right in (
            ("the number of slots", ours.size("slot"), theirs.size("slot")),
            ("blueprints", self.blueprints or catalogue.names, catalogue.names),
            ("action heads", ours, theirs),
            ("features", self.network.state_dim, FeatureTable.of(catalogue).size),
        ):
            require_agreement(what, ("the trained controller", left), ("the host", right))

    @torch.no_grad()
    def act(self, signals: Signals | Tensor, legality: Legality, starts: Tensor) -> Actions:
        if bool(starts.all()):
            self._hidden = None
        seen = signals if isinstance(signals, Tensor) else signals_to_features(signals)
        seen, before = seen.to(self.network.return_scale.device), self._hidden
        if self.greedy or isinstance(signals, Tensor):
            choice, _, self._hidden = self.network.get_action(
                seen, legality, before, starts, greedy=self.greedy, generator=self.generator
            )
            actions = Actions(self.network.space, choice.actions.cpu())
            if not bool(choice.log_probs.isfinite().all()):
                fix = "its observations, or what it has learned, are not finite: use another one"
                what = f"Controller {self.name!r} cannot decide"
                raise ActionError(what, given="probabilities that are NaN", fix=fix)
        else:
            logits, _, self._hidden = self.network(seen, before, starts)
            actions = drawn(logits, legality, signals.draws)
        self._last = seen, before, starts, legality, actions
        return actions

    @torch.no_grad()
    def thoughts(self) -> Thoughts:
        """How it came to its last decision; asks the network once more."""
        assert self._last is not None, "it has decided something"
        seen, before, starts, legality, actions = self._last
        outlook = self.network(seen, before, starts)
        masks, chosen = legality.resolved(actions.values), actions.values.to(seen.device)
        logits = logits_given(outlook.logits, legality.space, chosen)
        chances = MaskedCategorical(logits.cpu(), masks)
        log_probs = chances.log_prob(actions.values)
        return Thoughts(seen.cpu(), masks, chances.probs, outlook.values.cpu(), log_probs)


def drawn(logits: Logits, legality: Legality, draws: Tensor) -> Actions:
    """Composite actions from logits, with one number from 0 to 1 for each head in `draws`."""
    space = legality.space
    values = Actions.of(space, legality.hosts).values
    for head, (name, size) in enumerate(zip(space.names, space.sizes, strict=True)):
        own = head_logits(logits, space, head, values.to(logits[0].device))[:, :size].cpu()
        chances = MaskedCategorical(own, legality.mask(name, values)).probs
        values[:, head] = draw(chances, draws[:, head])
    return Actions(space, values)


KIND, VERSION = "esper controller", 1
SHIPPED = Path(__file__).parents[1] / "data" / "tamiyo"

Card = Mapping[str, Any]  # whatever JSON can hold: contexts, cost, scores, limits


class Kept(NamedTuple):
    """What a directory holds beside the weights."""

    network: RecurrentActorCritic
    slots: tuple[str, ...]
    blueprints: tuple[str, ...]
    card: Card


def keep_controller(
    network: RecurrentActorCritic, path: Path, catalogue: BlueprintCatalogue, card: Card
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
        told = [notes[name] for name in ("state_dim", "lstm_hidden_dim", "lstm_layers")]
        space, card = ActionSpace.from_dict(notes["space"]), dict(notes["card"])
        state_dim = len(archive.tensors["observation_norm.mean"])
        hidden = archive.tensors["lstm.weight_hh_l0"].shape[-1]  # of [4 * hidden, hidden]
        layers = sum(name.startswith("lstm.weight_hh_l") for name in archive.tensors)
        sizes = [state_dim, hidden, layers]
        if told != sizes or any(type(size) is not int for size in told):
            raise ValueError(f"sizes {told}")
        network = FactoredRecurrentActorCritic(space, *sizes)
        ours = {name: tensor.shape for name, tensor in network.state_dict().items()}
        stored = {name: tensor.shape for name, tensor in archive.tensors.items()}
        if ours != stored:
            wrong = sorted(name for name, _ in ours.items() ^ stored.items())
            raise ValueError(f"other tensors: {', '.join(wrong[:3])}")
        if broken := not_finite(archive.tensors):
            raise ValueError(f"NaN or infinite: {', '.join(broken[:3])}")
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
