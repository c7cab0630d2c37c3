"""Controllers that are trained networks, and the archive in which one is saved.

    controller/
      manifest.json                card; rule, or action space, sizes, slots and blueprints
      tensors-<hash>.safetensors   weights and statistics of the network

Two controllers are bundled with Esper. `tamiyo` is a network over tokens with the rule that
proposes actions to it; it serves any slots and blueprints. `specialist` serves the hosts of the
garden.

Shapes: `N` rows, `F` features, `H` heads, `A` actions of the largest head, `S` slots,
`P` blueprints.
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
from esper.leyline import (
    HEAD_NAMES,
    HEADS,
    Actions,
    ActionSpace,
    Legality,
    LifecycleOp,
    require_agreement,
)
from esper.leyline.catalogue import BlueprintCatalogue, refuse_removed_blueprints
from esper.leyline.errors import ActionError, EsperError, require_known
from esper.leyline.shadows import AuditionPlan
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.auditioning import ATTENTIVE, Audition, AuditionConfig, fitting
from esper.tamiyo.controllers.proposals import draw
from esper.tamiyo.controllers.protocol import Thoughts
from esper.tamiyo.controllers.specs import parse_settings
from esper.tamiyo.distributions import (
    Logits,
    MaskedCategorical,
    select_head_logits,
    stack_logits,
)
from esper.tamiyo.features import FeatureTable, signals_to_features
from esper.tamiyo.network import FactoredRecurrentActorCritic
from esper.tamiyo.recurrent import RecurrentActorCritic
from esper.tamiyo.saved_names import original_name, with_current_names
from esper.tamiyo.sequences import Hidden
from esper.tamiyo.token_layout import TokenLayout
from esper.tamiyo.token_network import TokenActorCritic

KIND = "esper controller"
VERSION = 2  # of the archive
OLDER_VERSIONS = (1,)  # version 1 has the tensor names of Esper 0.1
BUNDLED_FOLDER = Path(__file__).parents[1] / "data"
SIZES = ("state_dim", "lstm_hidden_dim", "lstm_layers")
RULE_PREFIX = "rule."  # of the rule's tensors in `TokenController.memory`

Card = Mapping[str, Any]  # JSON values that describe a controller: contexts, cost, scores, limits


class DecisionInputs(NamedTuple):
    """Inputs and result of the last decision, from which `thoughts` are computed on demand."""

    states: Tensor  # [N, F]
    hidden: Hidden | None  # before the decision
    starts: Tensor  # [N] bool
    legality: Legality
    actions: Actions


class LearnedController:
    """A trained network that decides without learning and keeps a hidden state over an episode.

    It decides greedily, or samples with `signals.draws`, so that the decisions of a row do not
    depend on other rows. Worlds other than gardens pass their observations [N, F] in place of
    signals. Samples then come from `generator`.
    """

    needs_contributions = True  # contributions are inputs of the network

    def __init__(
        self,
        network: RecurrentActorCritic,
        *,
        greedy: bool = True,
        name: str = "tamiyo",
        generator: torch.Generator | None = None,
        blueprints: tuple[str, ...] = (),
    ) -> None:
        """Create a controller without a hidden state.

        Args:
            network: The trained network.
            greedy: Take the most probable action instead of sampling.
            name: Name of the controller in tables and result files.
            generator: Random generator for observations that are not signals.
            blueprints: Blueprints of the hosts that it was trained on, if they are known.
        """
        self.network = network
        self.greedy = greedy
        self.name = name
        self.generator = generator
        self.blueprints = blueprints
        self._hidden: Hidden | None = None
        self._last_decision: DecisionInputs | None = None

    @property
    def fingerprint(self) -> str:
        """Hash of the network's tensors, which identifies a training."""
        # Tensors are hashed under their names of Esper 0.1. Published results identify trainings
        # by these fingerprints, so they must not change with the names.
        head_names = self.network.action_space.names
        tensors = {
            original_name(name, head_names): tensor
            for name, tensor in self.network.state_dict().items()
        }
        digest = hashlib.blake2b(f"greedy {self.greedy}".encode(), digest_size=6)
        for name, tensor in sorted(tensors.items()):
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def memory(self) -> dict[str, Tensor]:
        """Return the hidden state as tensors by name."""
        if self._hidden is None:
            return {}
        h, c = self._hidden
        return {"h": h, "c": c}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """Restore a hidden state that `memory` returned."""
        if not memory:
            self._hidden = None
            return
        device = self.network.return_scale.device
        self._hidden = memory["h"].to(device), memory["c"].to(device)

    def require_possible(self, catalogue: BlueprintCatalogue, horizon: int) -> None:
        """Raise an error for hosts with other slots or blueprints than those of the training.

        Raises:
            AgreementError: Slots, blueprints, action heads or features differ.
        """
        refuse_removed_blueprints(name for name in self.blueprints if name not in catalogue.names)
        network_space = self.network.action_space
        host_space = HEADS.resolve(catalogue)
        blueprints = self.blueprints or catalogue.names
        host_features = FeatureTable.of(catalogue).size
        comparisons = (
            ("the number of slots", network_space.size("slot"), host_space.size("slot")),
            ("blueprints", blueprints, catalogue.names),
            ("action heads", network_space, host_space),
            ("features", self.network.state_dim, host_features),
        )
        for subject, trained_value, host_value in comparisons:
            sides = ("the trained controller", trained_value), ("the host", host_value)
            require_agreement(subject, *sides)

    @torch.no_grad()
    def act(self, signals: Signals | Tensor, legality: Legality, starts: Tensor) -> Actions:
        """Choose one legal action for each row.

        Args:
            signals: Measurements of a garden, or observations [N, F] of another world.
            legality: Legal actions of the same rows.
            starts: Rows that begin an episode, [N] bool.

        Raises:
            ActionError: The action probabilities are NaN.
        """
        if bool(starts.all()):
            self._hidden = None
        if isinstance(signals, Tensor):
            states = signals
        else:
            states = self._encode_signals(signals, legality, starts)
        states = states.to(self.network.return_scale.device)
        hidden = self._hidden
        if self.greedy or isinstance(signals, Tensor):
            sampled, _, self._hidden = self.network.get_action(
                states, legality, hidden, starts, greedy=self.greedy, generator=self.generator
            )
            actions = Actions(self.network.action_space, sampled.actions.cpu())
            if not bool(sampled.log_probs.isfinite().all()):
                raise ActionError(
                    f"Controller {self.name!r} cannot decide",
                    given="probabilities that are NaN",
                    fix="its observations, or its weights, are not finite: use another controller",
                )
        else:
            logits, _, self._hidden = self.network(states, hidden, starts)
            actions = sample_with_draws(logits, legality, signals.draws)
        self._last_decision = DecisionInputs(states, hidden, starts, legality, actions)
        return actions

    def _encode_signals(self, signals: Signals, legality: Legality, starts: Tensor) -> Tensor:
        """Return the states [N, F] of the signals."""
        return signals_to_features(signals)

    @torch.no_grad()
    def thoughts(self) -> Thoughts:
        """Return what the last decision was based on. Runs the network once more."""
        assert self._last_decision is not None, "the controller has decided before"
        states, hidden, starts, legality, actions = self._last_decision
        output = self.network(states, hidden, starts)
        masks = legality.resolved(actions.values)
        logits = stack_logits(output.logits, legality.space, actions.values.to(states.device))
        distribution = MaskedCategorical(logits.cpu(), masks)
        return Thoughts(
            observations=states.cpu(),
            masks=masks,
            probabilities=distribution.probs,
            values=output.values.cpu(),
            log_probs=distribution.log_prob(actions.values),
        )


class TokenController(LearnedController):
    """A network over tokens with the rule that proposes actions to it, for any host.

    The rule also decides which shadows train.
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
        """Create a controller without a hidden state; see `LearnedController`.

        Args:
            network: The trained network.
            rule: The rule that proposes actions; by default the one that `tamiyo` was trained with.
            greedy: Take the most probable action instead of sampling.
            name: Name of the controller in tables and result files.
        """
        super().__init__(network, greedy=greedy, name=name)
        self.rule = rule or Audition(ATTENTIVE)

    @property
    def fingerprint(self) -> str:
        """Hash of the network's tensors, and the name of the rule."""
        return f"{super().fingerprint} {self.rule.name}"

    def memory(self) -> dict[str, Tensor]:
        """Return the state of the rule and the hidden state as tensors by name."""
        rule_memory = {RULE_PREFIX + name: tensor for name, tensor in self.rule.memory().items()}
        return rule_memory | super().memory()

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """Restore what `memory` returned."""
        rule_memory, network_memory = {}, {}
        for name, tensor in memory.items():
            if name.startswith(RULE_PREFIX):
                rule_memory[name.removeprefix(RULE_PREFIX)] = tensor
            else:
                network_memory[name] = tensor
        self.rule.recall(rule_memory)
        super().recall(network_memory)

    def require_possible(self, catalogue: BlueprintCatalogue, horizon: int) -> None:
        """Raise an error for episodes that are too short for the rule."""
        self.rule.require_possible(catalogue, horizon)

    def act(self, signals: Signals | Tensor, legality: Legality, starts: Tensor) -> Actions:
        """Choose one legal action for each row; see `LearnedController.act`."""
        actions = super().act(signals, legality, starts)
        if isinstance(signals, Signals):
            self.rule.overruled(self._proposed_actions, actions)
        return actions

    def audition(self, signals: Signals, legality: Legality) -> AuditionPlan:
        """Return which shadows train now."""
        return self.rule.audition(signals, legality)

    @torch.no_grad()
    def hopes(self, signals: Signals) -> Tensor:
        """Return how much the network prefers each seed to a uniform choice.

        Args:
            signals: Measurements of one host.

        Returns:
            Log of the probability that a seed is germinated, given that one is, less that of a
            uniform choice, [S, P]. It is 0 without training.
        """
        layout = self._set_layout(signals.catalogue)
        fits = fitting(signals)[0]  # [S, P]
        waiting = Actions.of(layout.space, 1, op=LifecycleOp.WAIT)
        states = layout.observe(signals, waiting).to(self.network.return_scale.device)
        logits = self.network(states).logits
        slot_logits = logits["slot"][0, LifecycleOp.GERMINATE].cpu()  # [S]
        blueprint_logits = logits["blueprint"][0].cpu()  # [S, P]
        slot_preference = _log_ratio_to_uniform(slot_logits, fits.any(1))
        blueprint_preference = _log_ratio_to_uniform(blueprint_logits, fits)
        return slot_preference[:, None] + blueprint_preference

    def _set_layout(self, catalogue: BlueprintCatalogue) -> TokenLayout:
        """Adapt the network to the slots and blueprints of a host and return their layout."""
        layout = TokenLayout.of(catalogue)
        if layout != self.network.layout:
            self.network = self.network.with_layout(layout)
        return layout

    def _encode_signals(self, signals: Signals, legality: Legality, starts: Tensor) -> Tensor:
        layout = self._set_layout(signals.catalogue)
        self._proposed_actions = self.rule.act(signals, legality, starts)
        return layout.observe(signals, self._proposed_actions)


def _log_ratio_to_uniform(logits: Tensor, mask: Tensor) -> Tensor:
    """Return log-probabilities of the legal actions, less those of a uniform choice, [..., A]."""
    log_probs = logits.double().masked_fill(~mask, -inf).log_softmax(-1).nan_to_num(-inf)
    num_legal = mask.double().sum(-1, keepdim=True).clamp(min=1)
    return log_probs + num_legal.log()


def sample_with_draws(logits: Logits, legality: Legality, draws: Tensor) -> Actions:
    """Sample a composite action for every row from given uniform random numbers.

    Args:
        logits: Logits of every head for `N` rows.
        legality: Legal actions of the same rows.
        draws: Numbers from 0 to 1, [N, H].
    """
    space = legality.space
    device = logits[space.names[0]].device
    values = Actions.of(space, legality.hosts).values  # [N, H]
    for position, head in enumerate(space.names):
        head_logits = select_head_logits(logits, space, head, values.to(device)).cpu()
        distribution = MaskedCategorical(head_logits, legality.mask(head, values))
        values[:, position] = draw(distribution.probs, draws[:, position])
    return Actions(space, values)


class SavedController(NamedTuple):
    """The content of a controller's directory."""

    network: RecurrentActorCritic
    slots: tuple[str, ...]  # empty for a network over tokens
    blueprints: tuple[str, ...]  # likewise
    card: Card
    rule: str = ATTENTIVE.name  # only for a network over tokens

    def controller(self, name: str = "tamiyo") -> LearnedController:
        """Return a greedy controller that shares the network."""
        if isinstance(self.network, TokenActorCritic):
            return TokenController(self.network, _parse_rule(self.rule), name=name)
        return LearnedController(self.network, name=name, blueprints=self.blueprints)


def controller_of_network(network: RecurrentActorCritic, name: str = "tamiyo") -> LearnedController:
    """Return a greedy controller of the class that belongs to the network."""
    return SavedController(network, slots=(), blueprints=(), card={}).controller(name)


def save_controller(
    network: RecurrentActorCritic,
    path: Path,
    catalogue: BlueprintCatalogue | None,
    card: Card,
    *,
    rule: str = ATTENTIVE.name,
) -> Path:
    """Save a trained network as a controller.

    Args:
        network: The trained network.
        path: Directory of the controller; another controller there is replaced.
        catalogue: Slots and blueprints of its hosts. A network over tokens does not need them.
        card: Description of the controller.
        rule: The rule that proposes actions to a network over tokens.

    Returns:
        The directory.
    """
    notes: dict[str, Any] = {"card": dict(card)}
    if isinstance(network, TokenActorCritic):
        notes["rule"] = rule
    else:
        assert catalogue is not None, "its actions are numbers of slots and blueprints"
        notes["space"] = asdict(network.action_space)
        notes["slots"] = list(catalogue.slots.names)
        notes["blueprints"] = list(catalogue.names)
        notes |= {name: getattr(network, name) for name in SIZES}
    tensors = network.state_dict()
    return write_archive(path, kind=KIND, version=VERSION, tensors=tensors, notes=notes)


def load_saved(path: Path) -> SavedController:
    """Load a saved controller.

    Raises:
        ArchiveError: The archive is damaged, or its tensors do not match its description.
    """
    archive = read_archive(path, kind=KIND, version=VERSION, older_versions=OLDER_VERSIONS)
    try:
        saved, tensors = _read_description(archive)
        expected = {name: tensor.shape for name, tensor in saved.network.state_dict().items()}
        stored = {name: tensor.shape for name, tensor in tensors.items()}
        if expected != stored:
            names = sorted(name for name, _ in expected.items() ^ stored.items())
            raise ValueError(f"other tensors: {', '.join(names[:3])}")
        if names := not_finite(tensors):
            raise ValueError(f"NaN or infinite: {', '.join(names[:3])}")
        saved.network.load_state_dict(tensors)
    except (LookupError, TypeError, ValueError, RuntimeError, EsperError) as error:
        raise ArchiveError(f"{path} does not describe a controller", given=error) from error
    saved.network.eval()
    return saved


def _read_description(archive: Archive) -> tuple[SavedController, dict[str, Tensor]]:
    """Return the described controller with initial weights, and its tensors by current names."""
    notes = archive.notes
    card = dict(notes["card"])
    if "rule" in notes:
        rule = _parse_rule(str(notes["rule"])).name
        tensors = _current_tensors(archive, HEAD_NAMES)
        return SavedController(TokenActorCritic(), (), (), card, rule), tensors

    # Compare the sizes with the tensors before memory is allocated for them.
    space = ActionSpace.from_dict(notes["space"])
    tensors = _current_tensors(archive, space.names)
    described_sizes = [notes[name] for name in SIZES]
    state_dim = len(tensors["observation_norm.mean"])
    lstm_hidden_dim = tensors["lstm.weight_hh_l0"].shape[-1]  # of [4 * hidden, hidden]
    lstm_layers = sum(name.startswith("lstm.weight_hh_l") for name in tensors)
    are_integers = all(type(size) is int for size in described_sizes)
    if described_sizes != [state_dim, lstm_hidden_dim, lstm_layers] or not are_integers:
        raise ValueError(f"sizes {described_sizes}")
    slots = tuple(str(name) for name in notes["slots"])
    blueprints = tuple(str(name) for name in notes["blueprints"])
    if (len(slots), len(blueprints)) != (space.size("slot"), space.size("blueprint")):
        raise ValueError(f"{len(slots)} slots, {len(blueprints)} blueprints")
    network = FactoredRecurrentActorCritic(
        space, state_dim=state_dim, lstm_hidden_dim=lstm_hidden_dim, lstm_layers=lstm_layers
    )
    return SavedController(network, slots, blueprints, card), tensors


def _current_tensors(archive: Archive, head_names: tuple[str, ...]) -> dict[str, Tensor]:
    if archive.version == VERSION:
        return dict(archive.tensors)
    return with_current_names(archive.tensors, head_names)


def _parse_rule(spec: str) -> Audition:
    """Return the rule that proposes actions, such as `audition:rounds=2`."""
    kind, _, text = spec.partition(":")
    require_known("rule that proposes actions", kind, ("audition",))
    return Audition(parse_settings(kind, text, AuditionConfig))


def is_saved(path: Path) -> bool:
    """Return whether the directory holds a saved controller."""
    return kind_of(path) == KIND


def load_saved_controller(path: Path, name: str) -> LearnedController:
    """Load a saved controller as a greedy controller with this name."""
    return load_saved(path).controller(name)


@lru_cache
def bundled(name: str = "tamiyo") -> SavedController:
    """Return a controller that is part of Esper; its card describes it."""
    return load_saved(BUNDLED_FOLDER / name)


@dataclass(frozen=True)
class BundledSettings:
    """Bundled controllers have no settings."""


def bundled_controller(name: str = "tamiyo") -> LearnedController:
    """Return a bundled controller with its own copy of the network and its own hidden state."""
    return deepcopy(bundled(name)).controller(name)
