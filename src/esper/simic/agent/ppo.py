"""The PPO agent: act, record, update, save and load.

`update.py` contains the update itself, `losses.py` its losses and `advantages.py` its advantages.

Shapes: `E` environments, `T` time, `F` state features, `H` heads, `L` layers, `D` hidden size.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from esper.archive import Archive, ArchiveError, read_archive, write_archive
from esper.archive.tensors import not_finite
from esper.distributed import SINGLE_PROCESS, Processes
from esper.leyline import ActionSpace, Legality, PPOUpdateMetrics, constants, require_agreement
from esper.leyline.errors import AgreementError
from esper.leyline.settings import COUNT, require
from esper.leyline.streams import derive_seed
from esper.simic.agent.ppo_config import PPOConfig
from esper.simic.agent.rollout_buffer import (
    NonFiniteError,
    RolloutError,
    TamiyoRolloutBuffer,
    missing_final_observation,
)
from esper.simic.agent.saved_agents import KIND, READABLE_VERSIONS, SavedAgent, describe_agent
from esper.simic.agent.types import CHECKPOINT_VERSION, Decision, Outcome
from esper.simic.agent.update import autocast, build_optimizer, optimizer_tensors, update
from esper.tamiyo.network import FactoredRecurrentActorCritic
from esper.tamiyo.recurrent import RecurrentActorCritic, unwrap_network
from esper.tamiyo.sequences import reset_hidden

__all__ = ["PPOAgent", "initial_weights"]

# Tensors with a row for each environment, and the dimension of these rows.
ENV_DIMENSION = {"hidden.h": 1, "hidden.c": 1, "buffer.next_starts": 0}


@contextmanager
def initial_weights(seed: int) -> Iterator[None]:
    """Draw the initial weights of networks that are built inside from a random seed.

    torch's global random generator is unchanged afterwards.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "weights"))
        yield


class PPOAgent:
    """A recurrent PPO agent with one policy head for each action head.

    A round is: `act` and `record` until the buffer is full, `bootstrap_and_compute_returns`,
    `update`. The hidden state is carried from round to round, so episodes may end at any step.
    Nothing in `act`, `record` and `bootstrap_and_compute_returns` waits for a GPU.

    With several processes, each has an agent with its own environments. An update then learns from
    the rollouts of all of them, as one process with all environments would. The initial weights are
    those of rank 0.
    """

    def __init__(
        self,
        action_space: ActionSpace | None = None,
        *,
        state_dim: int | None = None,
        num_envs: int = 1,
        max_steps_per_env: int = constants.DEFAULT_EPISODE_LENGTH,
        lstm_hidden_dim: int = constants.DEFAULT_LSTM_HIDDEN_DIM,
        lstm_layers: int = constants.DEFAULT_LSTM_LAYERS,
        config: PPOConfig | None = None,
        network: nn.Module | None = None,
        buffer: TamiyoRolloutBuffer | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        processes: Processes = SINGLE_PROCESS,
    ) -> None:
        """Create an agent with its network and buffer.

        Args:
            action_space: Names and sizes of the action heads. Not needed with a `network`.
            state_dim: Length `F` of the observation vector. Not needed with a `network`.
            num_envs: Environments `E` of this process.
            max_steps_per_env: Steps `T` of a rollout.
            lstm_hidden_dim: Hidden size `D` of the network.
            lstm_layers: LSTM layers `L` of the network.
            config: Settings of the learner.
            network: A network to use instead of a new `FactoredRecurrentActorCritic`.
            buffer: A buffer to use instead of a new one.
            seed: Random seed of the initial weights, the actions and the minibatches.
            device: Device of a new network and buffer.
            processes: Processes that learn together.

        Raises:
            AgreementError: Network, buffer and settings do not fit together.
        """
        self.config = config or PPOConfig()
        self.seed = seed
        self.processes = processes
        if network is None:
            if action_space is None or state_dim is None:
                raise AgreementError(
                    "An agent needs a network or the sizes of one",
                    given=f"action_space {action_space}, state_dim {state_dim}",
                    fix="pass action_space and state_dim, or network",
                )
            with initial_weights(seed):
                network = FactoredRecurrentActorCritic(
                    action_space,
                    state_dim=state_dim,
                    lstm_hidden_dim=lstm_hidden_dim,
                    lstm_layers=lstm_layers,
                )
            network.to(device)
        self.network = unwrap_network(network)
        self.action_space = self.network.action_space
        self.device = self.network.return_scale.device
        if action_space is not None:
            spaces = ("network", self.action_space), ("caller", action_space)
            require_agreement("action heads", *spaces)
        if state_dim is not None:
            sizes = ("network", self.network.state_dim), ("caller", state_dim)
            require_agreement("the state's size", *sizes)

        if buffer is None:  # an empty buffer is false
            buffer = TamiyoRolloutBuffer(
                self.action_space,
                num_envs=num_envs,
                max_steps_per_env=max_steps_per_env,
                state_dim=self.network.state_dim,
                lstm_hidden_dim=self.network.lstm_hidden_dim,
                lstm_layers=self.network.lstm_layers,
                device=self.device,
            )
        self.buffer = buffer
        self.env_slice = processes.env_slice(self.buffer.num_envs, self.device)
        self._require_agreement()

        processes.broadcast_module(self.network)
        self.optimizer = build_optimizer(self.network, self.config)
        # All processes draw the same numbers, and each uses those for its environments.
        self.sampler = _generator(self.device, seed, "act")
        self.shuffler = _generator("cpu", seed, "minibatches")
        self.hidden = self.network.get_initial_hidden(self.buffer.num_envs)
        self._compile()

    # --- rollout --------------------------------------------------------------------------------

    def reset(self) -> None:
        """Start a new episode in every environment and discard the rollout."""
        self.buffer.reset()
        self.buffer.next_starts.fill_(True)

    def act(
        self, observations: Tensor, legality: Legality, *, validate: bool | None = None
    ) -> Decision:
        """Sample an action for every environment, without gradient.

        Args:
            observations: Observations, [E, F].
            legality: Legal actions of every environment.
            validate: Raise an error for a head without a legal action. By default this is checked
                on a CPU at once, and on a GPU in `update`, because the check waits for the device.

        Raises:
            InvalidStateMachineError: A head has no legal action.
        """
        states = self._to_device(observations)
        entering = reset_hidden(self.hidden, self.buffer.next_starts)
        if validate is None:
            validate = self.device.type == "cpu"
        with autocast(self.config, self.device):
            sampled, values, (h, c) = self.network.get_action(
                states,
                legality,
                entering,
                generator=self.sampler,
                env_slice=self.env_slice,
                validate=validate,
                with_entropy_masks=self.config.entropy_steps == "legal",
            )
        self.hidden = (h.float(), c.float())
        return Decision(
            states=states,
            actions=sampled.actions,
            masks=sampled.masks,
            log_probs=sampled.log_probs,
            values=values,
            entropy_masks=sampled.entropy_masks,
            entropy_conditions=sampled.entropy_conditions,
            hidden=entering,
        )

    @torch.no_grad()
    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Store a decision and its outcome in the buffer.

        An environment that is not active keeps its hidden state, and nothing is stored for it.
        After a truncated step, the value of the true last observation is stored as bootstrap value.

        Args:
            decision: The decision that `act` returned.
            outcome: What the world returned for its actions.

        Raises:
            RolloutError: An episode was truncated without its last observation. On a GPU, `update`
                raises this error.
        """
        truncations = self._to_device(outcome.truncations)
        bootstrap_values = self._bootstrap_values(truncations, outcome.final_observations)
        if outcome.relevant is not None:
            decision = decision.mask_irrelevant_heads(self._to_device(outcome.relevant))
        active = None
        if outcome.active is not None:
            active = self._to_device(outcome.active)
        entropy_fields = {}
        if decision.entropy_masks is not None and decision.entropy_conditions is not None:
            entropy_fields["entropy_masks"] = decision.entropy_masks
            entropy_fields["entropy_conditions"] = decision.entropy_conditions
        self.buffer.add_batch(
            states=decision.states,
            actions=decision.actions,
            action_masks=decision.masks,
            log_probs=decision.log_probs,
            values=decision.values,
            hidden=decision.hidden,
            rewards=self._to_device(outcome.rewards),
            terminals=self._to_device(outcome.terminals),
            truncations=truncations,
            bootstrap_values=bootstrap_values,
            active=active,
            **entropy_fields,
        )
        if active is not None:
            h, c = self.hidden
            is_active = active[:, None]
            self.hidden = (
                torch.where(is_active, h, decision.hidden[0]),
                torch.where(is_active, c, decision.hidden[1]),
            )

    def _bootstrap_values(self, truncations: Tensor, final_observations: Tensor | None) -> Tensor:
        """Return the values of the last observations where episodes were truncated, else 0; [E]."""
        values = torch.zeros(len(truncations), device=self.device)
        if final_observations is None:
            if self.device.type == "cpu" and bool(truncations.any()):
                raise missing_final_observation(truncations)
            return values.masked_fill(truncations, torch.nan)  # `update` reports it

        # On a GPU, selecting rows would wait for the device: all rows are evaluated there.
        observations = self._to_device(final_observations)
        rows: Tensor | slice = slice(None)
        if self.device.type == "cpu":
            rows = truncations.nonzero()[:, 0]
            if not len(rows):
                return values
        hidden = (self.hidden[0][:, rows], self.hidden[1][:, rows])
        with autocast(self.config, self.device):
            output = self.network(observations[rows], hidden)
        values[rows] = _flag_nonfinite(output.values, observations[rows])
        return values.masked_fill(~truncations, 0.0)

    @torch.no_grad()
    def bootstrap_and_compute_returns(self, observations: Tensor) -> None:
        """End a rollout: estimate advantages and returns.

        Args:
            observations: Observations after the last step, [E, F]. Their values are the bootstrap
                values of episodes that have not ended.
        """
        states = self._to_device(observations)
        with autocast(self.config, self.device):
            output = self.network(states, self.hidden, self.buffer.next_starts)
        self.buffer.compute_advantages_and_returns(
            gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda,
            last_values=_flag_nonfinite(output.values, states),
        )

    # --- learning -------------------------------------------------------------------------------

    def update(
        self, clear_buffer: bool = True, accumulation_steps: int | None = None
    ) -> PPOUpdateMetrics:
        """Learn once from the rollout in the buffer.

        A rollout with a NaN or infinite number is rejected before anything changes. If the update
        itself leads to such a number, it raises an error. `restore_snapshot` then restores the
        agent. All processes that learn together must call this method.

        Args:
            clear_buffer: Reset the buffer afterwards.
            accumulation_steps: Micro-batches of a minibatch; by default that of the settings. The
                result does not depend on it beyond float tolerance.

        Returns:
            Metrics of the update, of all processes together.

        Raises:
            RolloutError: The rollout is empty, or an update has learned from it already.
            NonFiniteError: A number is NaN or infinite.
        """
        if accumulation_steps is None:
            accumulation_steps = self.config.accumulation_steps
        problem = "The number of accumulation steps"
        require(problem, accumulation_steps, COUNT, error=AgreementError)
        if self.buffer.consumed:
            raise RolloutError(
                "An update has learned from this rollout already, so its log-probabilities are "
                "those of older weights",
                fix="call buffer.reset() and collect another rollout",
            )
        metrics = update(
            self.network,
            self.optimizer,
            self.buffer,
            self.config,
            accumulation_steps=accumulation_steps,
            shuffler=self.shuffler,
            processes=self.processes,
        )
        if clear_buffer:
            self.buffer.reset()
        return metrics

    def set_hyperparameters(self, *, entropy_coef: float, lr: float) -> None:
        """Set the entropy coefficient and learning rate of the next update."""
        self.config = replace(self.config, entropy_coef=entropy_coef, lr=lr)

    def snapshot(self) -> Archive:
        """Return a copy of the agent's state for `restore_snapshot`."""
        tensors = {name: tensor.clone() for name, tensor in self._tensors().items()}
        return Archive(tensors, {})

    def restore_snapshot(self, snapshot: Archive) -> None:
        """Restore the state of a snapshot and discard the rollout.

        The random generators are not restored, so that the next rollout is a different one.
        """
        tensors = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
        for name, tensor in self._tensors().items():
            if name.startswith("random."):
                tensors[name] = tensor
        self._restore(tensors, "the snapshot")
        self.buffer.reset()

    # --- saved agents ---------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write everything that is needed to continue bit for bit.

        An agent is saved between rounds, with an empty buffer. With several processes all of them
        call this, and rank 0 writes one agent with the hidden state of all environments. Any number
        of processes can continue from it.

        Raises:
            RolloutError: The buffer is not empty.
            NonFiniteError: A weight is NaN or infinite. An earlier file stays as it is.
        """
        if len(self.buffer):
            problem = "An agent is saved between rounds"
            received = f"{len(self.buffer)} steps that were not learned from"
            raise RolloutError(
                problem, given=received, valid="an empty buffer", fix="save after update"
            )
        tensors = self._tensors()
        for name, dimension in ENV_DIMENSION.items():
            tensors[name] = self.processes.all_gather_rows(tensors[name], self.env_slice, dimension)
        if broken := not_finite(tensors):
            problem = "The agent is not saved, since numbers in it are NaN or infinite"
            suggestion = "continue from the last saved agent"
            raise NonFiniteError(problem, given=", ".join(broken[:3]), fix=suggestion)
        if self.processes.rank > 0:
            return Path(path)
        saved = SavedAgent(
            network=describe_agent(self._base_network),
            num_envs=self.env_slice[1],
            max_steps_per_env=self.buffer.max_steps_per_env,
            seed=self.seed,
            config=self.config,
        )
        return write_archive(
            path, kind=KIND, version=CHECKPOINT_VERSION, tensors=tensors, notes=saved.notes()
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: torch.device | str = "cpu",
        action_space: ActionSpace | None = None,
        state_dim: int | None = None,
        processes: Processes = SINGLE_PROCESS,
    ) -> "PPOAgent":
        """Load an agent that `save` wrote; the network is compiled after its weights are loaded.

        Args:
            path: Directory of the saved agent.
            device: Device of the agent.
            action_space: Raise an error if the agent has another action space.
            state_dim: Raise an error if the agent has another state size.
            processes: Processes that learn together. Each gets an equal share of the environments.

        Raises:
            ArchiveError: The files are missing, damaged or of another version.
            AgreementError: The agent has another action space or state size.
        """
        archive = read_archive(
            path, kind=KIND, version=CHECKPOINT_VERSION, older_versions=READABLE_VERSIONS
        )
        saved, tensors = SavedAgent.read(archive, path)
        if action_space is not None:
            spaces = ("checkpoint", saved.action_space), ("caller", action_space)
            require_agreement("action heads", *spaces)
        if state_dim is not None:
            sizes = ("checkpoint", saved.state_dim), ("caller", state_dim)
            require_agreement("the state's size", *sizes)

        # This process's share of the environments.
        first = saved.num_envs * processes.rank // processes.size
        end = saved.num_envs * (processes.rank + 1) // processes.size
        for name, dimension in ENV_DIMENSION.items():
            tensors[name] = tensors[name].narrow(dimension, first, end - first)

        with initial_weights(saved.seed):
            network = saved.build_network()
        agent = cls(
            network=network.to(device),
            num_envs=end - first,
            max_steps_per_env=saved.max_steps_per_env,
            config=replace(saved.config, compile_network=False, compile_mode="default"),
            seed=saved.seed,
            processes=processes,
        )
        agent._restore(tensors, path)
        agent.config = saved.config
        agent._compile()  # after the weights are loaded
        return agent

    @property
    def _base_network(self) -> RecurrentActorCritic:
        """The network itself, also if `network` was replaced by a compiled one.

        A compiled network has other names of parameters.
        """
        return unwrap_network(self.network)

    def _tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the agent's state by name."""
        tensors = {f"network.{n}": t for n, t in self._base_network.state_dict().items()}
        optimizer_state = optimizer_tensors(self._base_network, self.optimizer)
        tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer_state.items()}
        tensors["hidden.h"], tensors["hidden.c"] = self.hidden
        tensors["buffer.next_starts"] = self.buffer.next_starts
        tensors["random.sampler"] = self.sampler.get_state()
        tensors["random.shuffler"] = self.shuffler.get_state()
        return tensors

    def _restore(self, tensors: Mapping[str, Tensor], path: str | Path) -> None:
        """Load tensors; nothing changes if one is missing, surplus, non-finite or misshapen."""
        _require_none(not_finite(tensors), path)
        expected = {name: _shape_and_dtype(tensor) for name, tensor in self._tensors().items()}
        loaded = {name: _shape_and_dtype(tensor) for name, tensor in tensors.items()}
        sampler = loaded.get("random.sampler")
        if sampler is not None and sampler[1] is torch.uint8:
            expected["random.sampler"] = sampler  # its size depends on the device
        _require_none(sorted({name for name, _ in loaded.items() ^ expected.items()}), path)

        network_state = {
            name.removeprefix("network."): tensor
            for name, tensor in tensors.items()
            if name.startswith("network.")
        }
        self._base_network.load_state_dict(network_state)
        for name, tensor in optimizer_tensors(self._base_network, self.optimizer).items():
            tensor.copy_(tensors[f"optimizer.{name}"])
        self.hidden = (tensors["hidden.h"].to(self.device), tensors["hidden.c"].to(self.device))
        self.buffer.next_starts.copy_(tensors["buffer.next_starts"])
        self.shuffler.set_state(tensors["random.shuffler"])
        # The state of a generator belongs to its kind of device. On another kind it starts anew.
        if len(tensors["random.sampler"]) == len(self.sampler.get_state()):
            self.sampler.set_state(tensors["random.sampler"])

    # --- construction ---------------------------------------------------------------------------

    def _to_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the agent's device, without waiting for the transfer."""
        return tensor.to(self.device, non_blocking=True)

    def _compile(self) -> None:
        if not self.config.compile_network:
            return
        try:
            self.network.compile(
                backend=self.config.compile_backend,
                mode=self.config.compile_mode,
                fullgraph=False,
            )
        except torch._dynamo.exc.InvalidBackend as error:
            raise AgreementError(
                "torch.compile has no such backend",
                given=repr(self.config.compile_backend),
                valid=", ".join(torch.compiler.list_backends()),
            ) from error

    def _require_agreement(self) -> None:
        """Raise an error if network, buffer and settings do not fit together."""
        network, buffer = self.network, self.buffer
        for quantity, of_network, of_buffer in (
            ("action heads", network.action_space, buffer.action_space),
            ("the state's size", network.state_dim, buffer.state_dim),
            ("the LSTM's hidden size", network.lstm_hidden_dim, buffer.lstm_hidden_dim),
            ("the LSTM's layers", network.lstm_layers, buffer.lstm_layers),
            ("the device", network.return_scale.device, buffer.device),
        ):
            require_agreement(quantity, ("network", of_network), ("buffer", of_buffer))
        for head in self.config.entropy_targets:
            network.action_space.index(head)
        length = self.config.sequence_length or buffer.max_steps_per_env
        parts_per_env, rest = divmod(buffer.max_steps_per_env, length)
        num_envs = self.env_slice[1]
        if rest or self.config.minibatches > num_envs * parts_per_env:
            received = (
                f"{self.config.minibatches} minibatches, "
                f"sequence_length {self.config.sequence_length}"
            )
            valid = (
                f"at most {num_envs} environments × sequences that divide "
                f"{buffer.max_steps_per_env} steps"
            )
            problem = "Minibatches are made of whole sequences"
            raise AgreementError(problem, given=received, valid=valid)


def _require_none(wrong: Sequence[str], path: str | Path) -> None:
    """Raise an error if an archive has wrong tensors."""
    if wrong:
        problem = f"{path} holds other tensors than its notes describe, or such that are not finite"
        raise ArchiveError(problem, given=", ".join(wrong[:3]), fix="use another copy")


def _shape_and_dtype(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def _flag_nonfinite(values: Tensor, observations: Tensor) -> Tensor:
    """Return values [E], infinite where a value or an observation [E, F] is not finite.

    The update then reports it. A network may hide a NaN of its input.
    """
    is_finite = values.isfinite() & observations.isfinite().all(-1)
    return torch.where(is_finite, values, torch.inf)


def _generator(device: torch.device | str, *names: int | str) -> torch.Generator:
    return torch.Generator(device).manual_seed(derive_seed(*names))
