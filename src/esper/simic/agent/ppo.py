"""Recurrent, factored, masked PPO with credit only where a head mattered: the agent.

`update.py` has the update itself; what a saved agent is stands at the end of the class.

Shapes: `E` environments, `T` time, `F` state features, `H` heads, `L` layers, `D` hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.archive import Archive, ArchiveError, read_archive, write_archive
from esper.archive.tensors import not_finite
from esper.leyline import ActionSpace, Legality, PPOUpdateMetrics, constants, require_agreement
from esper.leyline.errors import AgreementError, EsperError
from esper.leyline.settings import COUNT, NONE, Range, filled, require
from esper.leyline.streams import derive_seed
from esper.simic.agent.ppo_config import PPOConfig
from esper.simic.agent.processes import ALONE, Processes
from esper.simic.agent.rollout_buffer import (
    NonFiniteError,
    RolloutError,
    TamiyoRolloutBuffer,
    missing_last_observation,
)
from esper.simic.agent.types import Decision, Outcome
from esper.simic.agent.update import GuardedAdamW, Update, precision
from esper.tamiyo import FactoredRecurrentActorCritic, TokenActorCritic, TokenLayout
from esper.tamiyo.network import RecurrentActorCritic, reset_hidden, unwrapped

KIND, VERSION = "ppo-agent", 3

# What a saved agent notes as numbers: the buffer's sizes, which are the network's too, and a seed.
_SIZES = ("state_dim", "lstm_hidden_dim", "lstm_layers", "envs", "steps")
_NUMBERS = (*_SIZES, "seed")
_MOST = {"steps": 2**24}  # of a rollout, which no tensor tells
_OF_ENVIRONMENTS = {"hidden.h": 1, "hidden.c": 1, "buffer.next_starts": 0}  # their rows' dimension


class PPOAgent:
    """Decides, remembers what came of it, and learns from whole sequences.

    A round: `act` and `record` until the buffer is full, `finish`, `update`. The hidden state is
    carried from round to round; episodes may end anywhere. Nothing in `act`, `record` and
    `finish` waits for a GPU.

    With `processes` that learn together, each has an agent with environments of its own; one
    update on the rollouts of all of them is the update that one process would make with all the
    environments. The weights are those of the first process.
    """

    def __init__(
        self,
        network: nn.Module,
        buffer: TamiyoRolloutBuffer,
        config: PPOConfig | None = None,
        *,
        seed: int = 0,
        processes: Processes = ALONE,
    ) -> None:
        self.network, self.buffer = unwrapped(network), buffer
        self.config, self.seed, self.processes = config or PPOConfig(), seed, processes
        self.space = self.network.space
        self.device = self.network.return_scale.device
        self.place = processes.place(buffer.envs, self.device)  # of its environments among all
        self._require_agreement()
        processes.share(self.network)
        self.optimizer = GuardedAdamW(self.network, self.config)
        # One stream for all processes, of which each takes what its own environments are due.
        self.sampler = _stream(self.device, seed, "act")
        self.shuffler = _stream("cpu", seed, "minibatches")
        self.hidden = self.network.get_initial_hidden(buffer.envs)
        self._compile()

    @classmethod
    def build(
        cls,
        space: ActionSpace,
        state_dim: int,
        envs: int,
        steps: int = constants.DEFAULT_EPISODE_LENGTH,
        config: PPOConfig | None = None,
        *,
        lstm_hidden_dim: int = constants.DEFAULT_LSTM_HIDDEN_DIM,
        lstm_layers: int = constants.DEFAULT_LSTM_LAYERS,
        direct: bool = False,
        layout: TokenLayout | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        processes: Processes = ALONE,
    ) -> "PPOAgent":
        """Network, buffer and agent that fit together; the same seed gives the same weights.

        With a `layout` the network is one over tokens, whose sizes are the layout's.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "weights"))
            size = (state_dim, lstm_hidden_dim, lstm_layers)
            network: RecurrentActorCritic
            if layout is None:
                network = FactoredRecurrentActorCritic(space, *size, direct=direct)
            else:
                network = TokenActorCritic(layout)
        memory = (network.lstm_hidden_dim, network.lstm_layers)
        buffer = TamiyoRolloutBuffer(space, state_dim, envs, steps, *memory, device)
        return cls(network.to(device), buffer, config, seed=seed, processes=processes)

    def begin(self) -> None:
        """All environments start anew: no memory, and nothing of a rollout that was broken off."""
        self.buffer.reset()
        self.buffer.next_starts.fill_(True)

    def act(
        self, observations: Tensor, legality: Legality, *, validate: bool | None = None
    ) -> Decision:
        """Draw an action for every environment from observations [E, F]; without gradient.

        A head without a legal action is refused: by default at once on a CPU, and on a GPU, which
        would have to be waited for, when `update` sees the whole rollout. `validate` decides.
        """
        states = self._here(observations)
        entering = reset_hidden(self.hidden, self.buffer.next_starts)
        with precision(self.config, self.device):
            choice, values, (h, c) = self.network.get_action(
                states,
                legality,
                entering,
                generator=self.sampler,
                among=self.place,
                validate=self.device.type == "cpu" if validate is None else validate,
            )
        self.hidden = (h.float(), c.float())
        return Decision(states, *choice, values, entering)

    @torch.no_grad()
    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Keep a decision and what came of it; rows that idle keep the memory they had before it,
        and heads that turned out not to matter are not learned from.

        Where an episode was cut, what would have followed is the value of its true last
        observation, with the memory after the last step. If that observation is missing, it is
        refused at once on a CPU, and on a GPU by `update`.
        """
        truncations = self._here(outcome.truncations)
        if outcome.final_observations is None:
            bootstraps = torch.zeros(len(truncations), device=self.device)
            bootstraps.masked_fill_(truncations, torch.nan)
            if self.device.type == "cpu" and bool(truncations.any()):
                raise missing_last_observation(truncations)
        else:
            bootstraps = self._values_after(truncations, self._here(outcome.final_observations))
        if outcome.relevant is not None:
            decision = decision.credited(self._here(outcome.relevant))
        active = None if outcome.active is None else self._here(outcome.active)
        self.buffer.add(
            **vars(decision),
            active=active,
            rewards=self._here(outcome.rewards),
            terminals=self._here(outcome.terminals),
            truncations=truncations,
            bootstraps=bootstraps,
        )
        if active is not None:
            h, c = (
                torch.where(active[:, None], after, before)
                for after, before in zip(self.hidden, decision.hidden, strict=True)
            )
            self.hidden = (h, c)

    def _values_after(self, truncations: Tensor, observations: Tensor) -> Tensor:
        """[E]: the values of last observations [E, F] where episodes were cut, else 0."""
        values = torch.zeros(len(truncations), device=self.device)
        rows: Tensor | slice = slice(None)  # on a GPU picking rows would be waited for
        if self.device.type == "cpu":
            rows = truncations.nonzero()[:, 0]
            if not len(rows):
                return values
        memory = (self.hidden[0][:, rows], self.hidden[1][:, rows])
        with precision(self.config, self.device):
            found = self.network(observations[rows], memory).values
        values[rows] = _known(found, observations[rows])
        return values.masked_fill(~truncations, 0.0)

    @torch.no_grad()
    def finish(self, observations: Tensor) -> None:
        """End a rollout: what follows each environment's last step is the value of [E, F]."""
        states = self._here(observations)
        with precision(self.config, self.device):
            values = self.network(states, self.hidden, self.buffer.next_starts).values
        self.buffer.compute_advantages_and_returns(
            _known(values, states), self.config.gamma, self.config.gae_lambda
        )

    def update(self, clear_buffer: bool = True, accumulation_steps: int = 1) -> PPOUpdateMetrics:
        """Learn from the rollout, once; `accumulation_steps` splits the work, not the result.

        What is NaN or infinite in the rollout is refused before anything changes; what has become
        so by it is refused after it: `undo` puts the agent back. Every process that learns with
        this one must call it too, also without a step of its own.
        """
        require("The number of accumulation steps", accumulation_steps, COUNT, error=AgreementError)
        if self.buffer.spent:
            raise RolloutError(
                "This rollout was learned from already: its log-probs are those of older weights, "
                "and the statistics have counted it",
                fix="call buffer.reset() and play another",
            )
        metrics = Update(
            self.network,
            self.optimizer,
            self.config,
            parts=accumulation_steps,
            shuffler=self.shuffler,
            processes=self.processes,
        ).run(self.buffer)
        if clear_buffer:
            self.buffer.reset()
        return metrics

    def state(self) -> Archive:
        """What `undo` puts back: a copy of the agent as it is."""
        return Archive({name: tensor.clone() for name, tensor in self._tensors().items()}, {})

    def undo(self, state: Archive) -> None:
        """Be again what `state` was taken of, without the rollout; random streams go on, so that
        the next one is another."""
        streams = {n: t for n, t in self._tensors().items() if n.startswith("random.")}
        before = {name: tensor.clone() for name, tensor in state.tensors.items()}
        self._restore(Archive(before | streams, {}), "the state before")
        self.buffer.reset()

    def anneal(self, *, entropy_coef: float, learning_rate: float) -> None:
        """What the next update uses in place of its settings."""
        self.config = replace(self.config, entropy_coef=entropy_coef, learning_rate=learning_rate)

    def _here(self, tensor: Tensor) -> Tensor:
        """Where the agent lives; a world may live elsewhere. Not waited for."""
        return tensor.to(self.device, non_blocking=True)

    def _compile(self) -> None:
        backend = self.config.compile_backend
        if backend is None:
            return
        try:
            self.network.compile(backend=backend, mode=self.config.compile_mode)
        except torch._dynamo.exc.InvalidBackend as error:
            raise AgreementError(
                "torch.compile has no such backend",
                given=repr(backend),
                valid=", ".join(torch._dynamo.list_backends()),
            ) from error

    def _require_agreement(self) -> None:
        network, buffer = self.network, self.buffer
        for what, left, right in (
            ("action heads", network.space, buffer.space),
            ("the state's size", network.state_dim, buffer.state_dim),
            ("the LSTM's hidden size", network.lstm_hidden_dim, buffer.lstm_hidden_dim),
            ("the LSTM's layers", network.lstm_layers, buffer.lstm_layers),
            ("the device", network.return_scale.device, buffer.device),
        ):
            require_agreement(what, ("network", left), ("buffer", right))
        for name in self.config.entropy_targets:
            network.space.index(name)
        cuts, rest = divmod(buffer.steps, self.config.sequence or buffer.steps)
        envs = self.place[1]
        if rest or self.config.minibatches > envs * cuts:
            given = f"{self.config.minibatches} minibatches, sequence {self.config.sequence}"
            valid = f"{envs} environments × sequences that divide {buffer.steps} steps"
            what = "Minibatches are made of whole sequences"
            raise AgreementError(what, given=given, valid=valid)

    # --- saved agents: weights, normalisers, optimiser, random streams, carried memory -------

    def save(self, path: str | Path) -> Path:
        """Write all that is needed to go on bit for bit; between rounds, with an empty buffer.

        Processes that learn together all call it; the first writes one agent with the memory of
        all environments, so that any number of processes can go on with it. Weights that are NaN
        or infinite are refused: what was saved before stays what it is.
        """
        if len(self.buffer):
            what = "An agent is saved between rounds"
            given = f"{len(self.buffer)} steps that were not learned from"
            raise RolloutError(what, given=given, valid="an empty buffer", fix="save after update")
        tensors = self._tensors()
        for name, rows in _OF_ENVIRONMENTS.items():
            tensors[name] = self.processes.united(tensors[name], self.place, rows)
        if broken := not_finite(tensors):
            what = "The agent is not saved, since numbers in it are NaN or infinite"
            fix = "go on from the last one that was saved"
            raise NonFiniteError(what, given=", ".join(broken[:3]), fix=fix)
        if self.processes.rank > 0:
            return Path(path)
        notes = {name: getattr(self.buffer, name) for name in _SIZES}
        notes |= {"config": asdict(self.config), "space": asdict(self.space), "seed": self.seed}
        if isinstance(self.network, TokenActorCritic):
            notes["layout"] = asdict(self.network.layout)
        notes["envs"] = self.place[1]
        return write_archive(path, kind=KIND, version=VERSION, tensors=tensors, notes=notes)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: torch.device | str = "cpu",
        space: ActionSpace | None = None,
        state_dim: int | None = None,
        processes: Processes = ALONE,
    ) -> "PPOAgent":
        """The agent that was saved; refused if it does not fit the given space or state.

        Of processes that learn together each takes an equal share of its environments.
        """
        archive = read_archive(path, kind=KIND, version=VERSION)
        try:
            saved_space, config, sizes = _described(archive.notes)
        except (LookupError, TypeError, ValueError, AttributeError, EsperError) as error:
            raise ArchiveError(f"{path} does not describe an agent", given=error) from error
        memory = tuple(sizes[name] for name in ("lstm_layers", "envs", "lstm_hidden_dim"))
        shapes = {  # compared before memory is taken for such sizes
            "hidden.h": memory,
            "hidden.c": memory,
            "buffer.next_starts": (sizes["envs"],),
            "network.observation_norm.mean": (0 if sizes["layout"] else sizes["state_dim"],),
        }
        found = archive.tensors
        _require_none([n for n in shapes if n not in found or found[n].shape != shapes[n]], path)
        if space is not None:
            require_agreement("action heads", ("checkpoint", saved_space), ("caller", space))
        if state_dim is not None:
            saved = ("checkpoint", sizes["state_dim"])
            require_agreement("the state's size", saved, ("caller", state_dim))
        eager = replace(config, compile_backend=None, compile_mode="default")
        sizes["direct"] = not sizes["layout"] and "network.memory_norm.weight" not in found
        if sizes["direct"] and "network.features.1.weight" not in found:
            what = f"{path} holds an agent for other worlds, made by an earlier version"
            raise ArchiveError(what, fix="train it again")
        first = sizes["envs"] * processes.rank // processes.size
        sizes["envs"] = sizes["envs"] * (processes.rank + 1) // processes.size - first
        share = (first, sizes["envs"])
        own = {name: found[name].narrow(rows, *share) for name, rows in _OF_ENVIRONMENTS.items()}
        agent = cls.build(saved_space, config=eager, device=device, processes=processes, **sizes)
        agent._restore(Archive({**found, **own}, archive.notes), path)
        agent.config = config
        agent._compile()  # after the weights are in
        return agent

    def _tensors(self) -> dict[str, Tensor]:
        weights = unwrapped(self.network).state_dict()  # a compiled one has other names
        return {
            **{f"network.{name}": tensor for name, tensor in weights.items()},
            **{f"optimizer.{name}": tensor for name, tensor in self.optimizer.moments.items()},
            "hidden.h": self.hidden[0],
            "hidden.c": self.hidden[1],
            "buffer.next_starts": self.buffer.next_starts,
            "random.sampler": self.sampler.get_state(),
            "random.shuffler": self.shuffler.get_state(),
        }

    def _restore(self, archive: Archive, path: str | Path) -> None:
        """Take over saved tensors; none is touched if one is missing, surplus, or of another shape
        or type than our own."""
        tensors = archive.tensors
        _require_none(not_finite(tensors), path)
        expected = {name: _form(tensor) for name, tensor in self._tensors().items()}
        found = {name: _form(tensor) for name, tensor in tensors.items()}
        if found.get("random.sampler", ((), None))[1] is torch.uint8:
            expected["random.sampler"] = found["random.sampler"]  # another device's: another size
        _require_none(sorted({name for name, _ in found.items() ^ expected.items()}), path)

        unwrapped(self.network).load_state_dict(archive.part("network"))
        for name, moment in self.optimizer.moments.items():
            moment.copy_(tensors[f"optimizer.{name}"])
        self.hidden = (tensors["hidden.h"].to(self.device), tensors["hidden.c"].to(self.device))
        self.buffer.next_starts.copy_(tensors["buffer.next_starts"])
        self.shuffler.set_state(tensors["random.shuffler"])
        # A generator's state is of its device's kind; on another device the stream starts anew.
        if len(tensors["random.sampler"]) == len(self.sampler.get_state()):
            self.sampler.set_state(tensors["random.sampler"])


def _described(notes: Mapping[str, Any]) -> tuple[ActionSpace, PPOConfig, dict[str, Any]]:
    """Action space, settings and sizes of a saved agent, each of its own type."""
    known = {"space", "config", *_NUMBERS}
    if wrong := (notes.keys() - {"layout"}) ^ known:
        raise LookupError(f"unknown or missing: {', '.join(sorted(wrong))}")
    for name in _NUMBERS:
        require(name, notes[name], Range(least=0, most=_MOST.get(name, 2**63 - 1), whole=True))
    settings = {name: NONE if v is None else v for name, v in notes["config"].items()}
    config = filled(PPOConfig(), settings, "setting of the learner")
    space, sizes = ActionSpace.from_dict(notes["space"]), {name: notes[name] for name in _NUMBERS}
    sizes["layout"] = layout = TokenLayout(**notes["layout"]) if "layout" in notes else None
    if layout and (layout.space, layout.state_dim) != (space, sizes["state_dim"]):
        raise ValueError(f"other sizes than of {layout}")
    return space, config, sizes


def _require_none(wrong: Sequence[str], path: str | Path) -> None:
    """Refuse an archive if tensors of it are wrong."""
    if wrong:
        what = f"{path} holds other tensors than its notes describe, or such that are not finite"
        raise ArchiveError(what, given=", ".join(wrong[:3]), fix="use another copy")


def _form(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def _known(values: Tensor, observations: Tensor) -> Tensor:
    """Values [E], infinite where they or observations [E, F] are not finite: `update` says so."""
    sound = values.isfinite() & observations.isfinite().all(-1)
    return torch.where(sound, values, torch.inf)


def _stream(device: torch.device | str, *names: int | str) -> torch.Generator:
    return torch.Generator(device).manual_seed(derive_seed(*names))
