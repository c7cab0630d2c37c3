"""Tamiyo: a trained network as a controller, and the directory in which one is kept.

    controller/
      manifest.json                action space, sizes, slots, blueprints, card; or rule, card
      tensors-<hash>.safetensors   the network with its normalisers

`tamiyo` comes with Esper: a network over tokens, which is kept with the rule that advises it and
decides for hosts with any slots and blueprints. So does `specialist`, which knows the garden.

Shapes: `N` rows, `F` features, `H` heads, `A` actions of the largest head.
"""

import hashlib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.archive import Archive, ArchiveError, kind_of, read_archive, write_archive
from esper.archive.tensors import not_finite
from esper.leyline import HEADS, Actions, ActionSpace, Legality, LifecycleOp, require_agreement
from esper.leyline.catalogue import BlueprintCatalogue, refuse_removed_blueprints
from esper.leyline.errors import ActionError, EsperError, require_known
from esper.leyline.shadows import AuditionPlan
from esper.leyline.signals import Signals
from esper.tamiyo.choosing import Logits, MaskedCategorical, head_logits, logits_given
from esper.tamiyo.controllers.auditioning import ATTENTIVE, Audition, AuditionConfig, fitting
from esper.tamiyo.controllers.proposals import draw
from esper.tamiyo.controllers.protocol import Thoughts
from esper.tamiyo.controllers.specs import parse_settings
from esper.tamiyo.features import FeatureTable, signals_to_features
from esper.tamiyo.network import FactoredRecurrentActorCritic, Hidden, RecurrentActorCritic
from esper.tamiyo.token_layout import TokenLayout
from esper.tamiyo.token_network import TokenActorCritic


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
        refuse_removed_blueprints(name for name in self.blueprints if name not in catalogue.names)
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
        seen = signals if isinstance(signals, Tensor) else self._observed(signals, legality, starts)
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

    def _observed(self, signals: Signals, legality: Legality, starts: Tensor) -> Tensor:
        return signals_to_features(signals)

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


class TokenController(LearnedController):
    """A network over tokens and the rule that advises it: for any host.

    Shadows train as the rule plans.
    """

    network: TokenActorCritic

    def __init__(
        self,
        network: TokenActorCritic,
        rule: Audition | None = None,
        *,
        greedy: bool = True,
        name: str = "tamiyo",
    ) -> None:
        super().__init__(network, greedy=greedy, name=name)
        self.rule = rule or Audition(ATTENTIVE)

    @property
    def fingerprint(self) -> str:
        return f"{super().fingerprint} {self.rule.name}"

    def memory(self) -> dict[str, Tensor]:
        return {_RULE + name: each for name, each in self.rule.memory().items()} | super().memory()

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        told = {name.removeprefix(_RULE): each for name, each in memory.items() if _RULE in name}
        self.rule.recall(told)
        super().recall({name: each for name, each in memory.items() if _RULE not in name})

    def require_possible(self, catalogue: BlueprintCatalogue, horizon: int) -> None:
        """Refuse only what is too short for the rule."""
        self.rule.require_possible(catalogue, horizon)

    def act(self, signals: Signals | Tensor, legality: Legality, starts: Tensor) -> Actions:
        actions = super().act(signals, legality, starts)
        if isinstance(signals, Signals):
            self.rule.overruled(self._advice, actions)
        return actions

    def audition(self, signals: Signals, legality: Legality) -> AuditionPlan:
        return self.rule.audition(signals, legality)

    @torch.no_grad()
    def hopes(self, signals: Signals) -> Tensor:
        """[S, P] of one host: how much likelier than by chance each seed is to be planted, if one
        is, as a logarithm; 0 without training."""
        layout, fits = self._laid_out(signals.catalogue), fitting(signals)[0]
        waits = Actions.of(layout.space, 1, op=LifecycleOp.WAIT)
        seen = layout.observe(signals, waits).to(self.network.return_scale.device)
        _, slots, kinds, _ = (each[0].cpu() for each in self.network(seen).logits)
        found: Tensor = _over_chance(slots[LifecycleOp.GERMINATE], fits.any(1))[:, None]
        return found + _over_chance(kinds, fits)

    def _laid_out(self, catalogue: BlueprintCatalogue) -> TokenLayout:
        layout = TokenLayout.of(catalogue)
        if layout != self.network.layout:
            self.network = self.network.laid_out(layout)
        return layout

    def _observed(self, signals: Signals, legality: Legality, starts: Tensor) -> Tensor:
        layout = self._laid_out(signals.catalogue)
        self._advice = self.rule.act(signals, legality, starts)
        return layout.observe(signals, self._advice)


_RULE = "rule."  # before what the rule remembers


def _over_chance(logits: Tensor, open_: Tensor) -> Tensor:
    """[..., A]: log-chances of what is open, less those of a fair choice."""
    chances = logits.double().masked_fill(~open_, -inf).log_softmax(-1).nan_to_num(-inf)
    return chances + open_.double().sum(-1, keepdim=True).clamp(min=1).log()


def _rule(spec: str) -> Audition:
    kind, _, text = spec.partition(":")
    require_known("rule that advises", kind, ("audition",))
    return Audition(parse_settings(kind, text, AuditionConfig))


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
SHIPPED = Path(__file__).parents[1] / "data"

Card = Mapping[str, Any]  # whatever JSON can hold: contexts, cost, scores, limits


class Kept(NamedTuple):
    """What a directory holds beside the weights."""

    network: RecurrentActorCritic
    slots: tuple[str, ...]  # none where any will do, and no blueprints
    blueprints: tuple[str, ...]
    card: Card
    rule: str = ATTENTIVE.name  # that advises

    def controller(self, name: str = "tamiyo") -> LearnedController:
        """As it is; it decides greedily."""
        if isinstance(self.network, TokenActorCritic):
            return TokenController(self.network, _rule(self.rule), name=name)
        return LearnedController(self.network, name=name, blueprints=self.blueprints)


def controller_of_network(network: RecurrentActorCritic, name: str = "tamiyo") -> LearnedController:
    """The network as a controller of its kind."""
    return Kept(network, (), (), {}).controller(name)


def keep_controller(
    network: RecurrentActorCritic,
    path: Path,
    catalogue: BlueprintCatalogue | None,
    card: Card,
    *,
    rule: str = ATTENTIVE.name,
) -> Path:
    """Write a trained network as a controller for hosts with this catalogue's blueprints; one over
    tokens is for any, and kept with the rule that advises it."""
    notes: dict[str, Any] = {"card": dict(card)}
    if isinstance(network, TokenActorCritic):
        notes["rule"] = rule
    else:
        assert catalogue is not None, "it knows slots and blueprints by their places"
        sizes = ("state_dim", "lstm_hidden_dim", "lstm_layers")
        notes |= {"space": asdict(network.space), "slots": list(catalogue.slots.names)}
        notes |= {"blueprints": list(catalogue.names)}
        notes |= {name: getattr(network, name) for name in sizes}
    return write_archive(
        path, kind=KIND, version=VERSION, tensors=network.state_dict(), notes=notes
    )


def read_kept(path: Path) -> Kept:
    """A kept network; refused if it is damaged or does not fit its own description."""
    archive = read_archive(path, kind=KIND, version=VERSION)
    try:
        kept = _described(archive)
        network = kept.network
        ours = {name: tensor.shape for name, tensor in network.state_dict().items()}
        stored = {name: tensor.shape for name, tensor in archive.tensors.items()}
        if ours != stored:
            wrong = sorted(name for name, _ in ours.items() ^ stored.items())
            raise ValueError(f"other tensors: {', '.join(wrong[:3])}")
        if broken := not_finite(archive.tensors):
            raise ValueError(f"NaN or infinite: {', '.join(broken[:3])}")
        network.load_state_dict(dict(archive.tensors))
    except (LookupError, TypeError, ValueError, RuntimeError, EsperError) as error:
        raise ArchiveError(f"{path} does not describe a controller", given=error) from error
    network.eval()
    return kept


def _described(archive: Archive) -> Kept:
    """As the notes say, with weights that are yet to be read."""
    notes, tensors = archive.notes, archive.tensors
    card = dict(notes["card"])
    if "rule" in notes:
        return Kept(TokenActorCritic(), (), (), card, _rule(str(notes["rule"])).name)
    told = [notes[name] for name in ("state_dim", "lstm_hidden_dim", "lstm_layers")]
    space = ActionSpace.from_dict(notes["space"])
    state_dim = len(tensors["observation_norm.mean"])
    hidden = tensors["lstm.weight_hh_l0"].shape[-1]  # of [4 * hidden, hidden]
    layers = sum(name.startswith("lstm.weight_hh_l") for name in tensors)
    sizes = [state_dim, hidden, layers]
    if told != sizes or any(type(size) is not int for size in told):
        raise ValueError(f"sizes {told}")
    slots, blueprints = (tuple(map(str, notes[name])) for name in ("slots", "blueprints"))
    if (len(slots), len(blueprints)) != (space.size("slot"), space.size("blueprint")):
        raise ValueError(f"{len(slots)} slots, {len(blueprints)} blueprints")
    return Kept(FactoredRecurrentActorCritic(space, *sizes), slots, blueprints, card)


def is_kept(path: Path) -> bool:
    return kind_of(path) == KIND


def kept_controller(path: Path, name: str) -> LearnedController:
    """The controller in a directory, under that name; it decides greedily."""
    return read_kept(path).controller(name)


@lru_cache
def shipped(name: str = "tamiyo") -> Kept:
    """A controller that comes with Esper; its card says what it can do."""
    return read_kept(SHIPPED / name)


@dataclass(frozen=True)
class ShippedSettings:
    """There is nothing to set."""


def shipped_controller(name: str = "tamiyo") -> LearnedController:
    """One of them, with a memory of its own."""
    return deepcopy(shipped(name)).controller(name)
