"""Recurrent, factored, masked PPO with credit only where a head mattered.

Shapes: `E` environments, `T` time, `F` state features, `H` heads, `R` sequences of a batch.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from esper.leyline.constants import (
    DEFAULT_EPISODE_LENGTH,
    DEFAULT_LSTM_HIDDEN_DIM,
    DEFAULT_LSTM_LAYERS,
)
from esper.leyline.errors import AgreementError
from esper.leyline.heads import ActionSpace
from esper.leyline.legality import Legality
from esper.leyline.results import PPOUpdateMetrics
from esper.leyline.slots import require_agreement
from esper.leyline.streams import derive_seed
from esper.simic.agent.checkpoint import read_agent, restore_agent, save_agent
from esper.simic.agent.processes import ALONE, Processes
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, missing_last_observation
from esper.simic.agent.settings import PPOConfig
from esper.simic.agent.types import Decision, Outcome, SequenceBatch
from esper.simic.agent.updates import Update, optimizer
from esper.tamiyo.network import Evaluation, FactoredRecurrentActorCritic, unwrapped
from esper.tamiyo.sequences import reset_hidden


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
        self._require_agreement()
        self.space = self.network.space
        self.device = self.network.return_scale.device
        processes.share(self.network)
        self.optimizer = optimizer(self.network, self.config)
        own = (processes.rank,) if processes.rank else ()  # every process draws its own numbers
        self.sampler = _stream(self.device, seed, "act", *own)
        self.shuffler = _stream("cpu", seed, "minibatches", *own)
        self.hidden = self.network.get_initial_hidden(buffer.envs)
        # Parameters whose gradient norms are reported: of each head, of the value head, the rest.
        self.gradient_groups = [list(head.parameters()) for head in self.network.heads]
        self.gradient_groups.append(list(self.network.value_head.parameters()))
        apart = {id(parameter) for group in self.gradient_groups for parameter in group}
        self.gradient_groups.append([p for p in self.network.parameters() if id(p) not in apart])
        self._compile()

    @classmethod
    def build(
        cls,
        space: ActionSpace,
        state_dim: int,
        envs: int,
        steps: int = DEFAULT_EPISODE_LENGTH,
        config: PPOConfig | None = None,
        *,
        lstm_hidden_dim: int = DEFAULT_LSTM_HIDDEN_DIM,
        lstm_layers: int = DEFAULT_LSTM_LAYERS,
        seed: int = 0,
        device: torch.device | str = "cpu",
        processes: Processes = ALONE,
    ) -> "PPOAgent":
        """Network, buffer and agent that fit together; the same seed gives the same weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "weights"))
            network = FactoredRecurrentActorCritic(space, state_dim, lstm_hidden_dim, lstm_layers)
        buffer = TamiyoRolloutBuffer(
            space, state_dim, envs, steps, lstm_hidden_dim, lstm_layers, device
        )
        return cls(network.to(device), buffer, config, seed=seed, processes=processes)

    def act(
        self, observations: Tensor, legality: Legality, *, validate: bool | None = None
    ) -> Decision:
        """Draw an action for every environment from observations [E, F]; without gradient.

        A head without a legal action is refused: by default at once on a CPU, and on a GPU, which
        would have to be waited for, when `update` sees the whole rollout. `validate` decides.
        """
        states = self._here(observations)
        entering = reset_hidden(self.hidden, self.buffer.next_starts)
        with self._precision():
            choice, values, (h, c) = self.network.get_action(
                states,
                legality,
                entering,
                generator=self.sampler,
                validate=self.device.type == "cpu" if validate is None else validate,
            )
        self.hidden = (h.float(), c.float())
        return Decision(states, *choice, values, entering)

    @torch.no_grad()
    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Keep a decision and what came of it.

        Where an episode was cut, what would have followed is the value of its true last
        observation, with the memory after the last step. If that observation is missing, it is
        refused at once on a CPU, and on a GPU by `update`.
        """
        truncations = self._here(outcome.truncations)
        if outcome.final_observations is None:
            bootstraps = torch.where(truncations, torch.nan, 0.0)
            if self.device.type == "cpu" and bool(truncations.any()):
                raise missing_last_observation(truncations)
        else:
            bootstraps = self._values_after(truncations, self._here(outcome.final_observations))
        self.buffer.add(
            hidden=decision.hidden,
            active=None if outcome.active is None else self._here(outcome.active),
            states=decision.states,
            actions=decision.actions,
            masks=decision.masks,
            log_probs=decision.log_probs,
            values=decision.values,
            rewards=self._here(outcome.rewards),
            terminals=self._here(outcome.terminals),
            truncations=truncations,
            bootstraps=bootstraps,
        )

    def _values_after(self, truncations: Tensor, observations: Tensor) -> Tensor:
        """[E]: the values of last observations [E, F] where episodes were cut, else 0."""
        values = torch.zeros(len(truncations), device=self.device)
        rows: Tensor | slice = slice(None)  # on a GPU picking rows would be waited for
        if self.device.type == "cpu":
            rows = truncations.nonzero()[:, 0]
            if not len(rows):
                return values
        memory = (self.hidden[0][:, rows], self.hidden[1][:, rows])
        with self._precision():
            values[rows] = self.network(observations[rows], memory).values
        return values.masked_fill(~truncations, 0.0)

    @torch.no_grad()
    def finish(self, observations: Tensor) -> None:
        """End a rollout: what follows each environment's last step is the value of [E, F]."""
        with self._precision():
            states, starts = self._here(observations), self.buffer.next_starts
            values = self.network(states, self.hidden, starts).values
        self.buffer.compute_advantages_and_returns(
            values, self.config.gamma, self.config.gae_lambda
        )

    def update(self, clear_buffer: bool = True, accumulation_steps: int = 1) -> PPOUpdateMetrics:
        """Learn from the rollout; `accumulation_steps` splits the work, not the result.

        Every process that learns with this one must call it too, also without a step of its own.
        """
        if accumulation_steps < 1:
            raise AgreementError("Accumulation needs steps", given=accumulation_steps, valid="1 up")
        metrics = Update(self, accumulation_steps).run()
        if clear_buffer:
            self.buffer.reset()
        return metrics

    def anneal(self, *, entropy_coef: float, learning_rate: float) -> None:
        """What the next update uses in place of its settings."""
        self.config = replace(self.config, entropy_coef=entropy_coef, learning_rate=learning_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def evaluate(self, batch: SequenceBatch) -> Evaluation:
        """The batch's decisions, seen with the present weights; carries gradient."""
        with self._precision():
            return self.network.evaluate_actions(
                batch.states, batch.actions, batch.masks, batch.hidden, batch.starts
            )

    def _here(self, tensor: Tensor) -> Tensor:
        """Where the agent lives; a world may live elsewhere. Not waited for."""
        return tensor.to(self.device, non_blocking=True)

    def _precision(self) -> AbstractContextManager[object]:
        if not self.config.bf16:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def _compile(self) -> None:
        backend = self.config.compile_backend
        if backend is None:
            return
        try:
            self.network.compile(backend=backend)
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
            ("the device", network.return_scale.device.type, buffer.device.type),
        ):
            require_agreement(what, ("network", left), ("buffer", right))
        for name in self.config.entropy_targets:
            network.space.index(name)
        if self.config.minibatches > buffer.envs:
            raise AgreementError(
                "Minibatches are made of whole sequences",
                given=f"{self.config.minibatches} minibatches",
                valid=f"at most {buffer.envs}, one for each environment",
            )

    def save(self, path: str | Path) -> Path:
        """Write all that is needed to go on bit for bit; between rounds, with an empty buffer."""
        return save_agent(self, path)

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

        Processes that learn together save and load one agent each.
        """
        saved = read_agent(path, space, state_dim)
        sizes = {"lstm_hidden_dim": saved.lstm_hidden_dim, "lstm_layers": saved.lstm_layers}
        agent = cls.build(
            saved.space,
            saved.state_dim,
            saved.envs,
            saved.steps,
            replace(saved.config, compile_backend=None),
            seed=saved.seed,
            device=device,
            processes=processes,
            **sizes,
        )
        restore_agent(agent, saved)
        agent.config = saved.config
        agent._compile()  # after the weights are in
        return agent


def _stream(device: torch.device | str, *names: int | str) -> torch.Generator:
    return torch.Generator(device).manual_seed(derive_seed(*names))
