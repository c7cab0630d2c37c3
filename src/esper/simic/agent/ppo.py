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
    KL_STOP_FACTOR,
)
from esper.leyline.errors import AgreementError
from esper.leyline.heads import ActionSpace
from esper.leyline.legality import Legality
from esper.leyline.results import PPOUpdateMetrics
from esper.leyline.slots import require_agreement
from esper.leyline.streams import derive_seed
from esper.simic.agent.checkpoint import read_agent, restore_agent, save_agent
from esper.simic.agent.losses import (
    Terms,
    entropy_coefficients,
    mattered,
    ppo_terms,
    shares,
    total_loss,
)
from esper.simic.agent.metrics import GradientNorms, Tally
from esper.simic.agent.rollout_buffer import RolloutError, TamiyoRolloutBuffer
from esper.simic.agent.types import Decision, Outcome, PPOConfig, SequenceBatch
from esper.tamiyo.network import Evaluation, FactoredRecurrentActorCritic, unwrapped


class PPOAgent:
    """Decides, remembers what came of it, and learns from whole sequences.

    A round: `act` and `record` until the buffer is full, `finish`, `update`. The hidden state is
    carried from round to round; episodes may end anywhere.
    """

    def __init__(
        self,
        network: nn.Module,
        buffer: TamiyoRolloutBuffer,
        config: PPOConfig | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self.network, self.buffer = unwrapped(network), buffer
        self.config, self.seed = config or PPOConfig(), seed
        self._require_agreement()
        self.space = self.network.space
        self.device = self.network.return_scale.device
        self.optimizer = _optimizer(self.network, self.config)
        self.sampler = torch.Generator(self.device).manual_seed(derive_seed(seed, "act"))
        self.shuffler = torch.Generator().manual_seed(derive_seed(seed, "minibatches"))
        self.hidden = self.network.get_initial_hidden(buffer.envs)
        self._groups = [list(head.parameters()) for head in self.network.heads]
        self._groups.append(list(self.network.value_head.parameters()))
        apart = {id(parameter) for group in self._groups for parameter in group}
        self._groups.append([p for p in self.network.parameters() if id(p) not in apart])
        if self.config.compile_backend is not None:
            self.network.compile(backend=self.config.compile_backend)

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
    ) -> "PPOAgent":
        """Network, buffer and agent that fit together; the same seed gives the same weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "weights"))
            network = FactoredRecurrentActorCritic(space, state_dim, lstm_hidden_dim, lstm_layers)
        buffer = TamiyoRolloutBuffer(
            space, state_dim, envs, steps, lstm_hidden_dim, lstm_layers, device
        )
        return cls(network.to(device), buffer, config, seed=seed)

    def act(self, observations: Tensor, legality: Legality) -> Decision:
        """Draw an action for every environment from observations [E, F]; without gradient."""
        hidden = self.hidden
        with self._precision():
            choice, values, (h, c) = self.network.get_action(
                observations, legality, hidden, self.buffer.next_starts, generator=self.sampler
            )
        self.hidden = (h.float(), c.float())
        return Decision(
            observations, choice.actions, choice.masks, choice.log_probs, values, hidden
        )

    @torch.no_grad()
    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Keep a decision and what came of it.

        Where an episode was cut, what would have followed is the value of its true last
        observation, with the memory after the last step.
        """
        bootstraps = torch.zeros_like(outcome.rewards)
        cut = outcome.truncations.nonzero()[:, 0]
        if len(cut):
            if outcome.final_observations is None:
                raise RolloutError(
                    "An episode was cut and its last observation is missing",
                    given=f"environments {cut.tolist()[:8]}",
                    fix="give final_observations, or call it a terminal if nothing follows",
                )
            memory = (self.hidden[0][:, cut], self.hidden[1][:, cut])
            with self._precision():
                bootstraps[cut] = self.network(outcome.final_observations[cut], memory).values
        self.buffer.add(
            hidden=decision.hidden,
            active=outcome.active,
            states=decision.states,
            actions=decision.actions,
            masks=decision.masks,
            log_probs=decision.log_probs,
            values=decision.values,
            rewards=outcome.rewards,
            terminals=outcome.terminals,
            truncations=outcome.truncations,
            bootstraps=bootstraps,
        )

    @torch.no_grad()
    def finish(self, observations: Tensor) -> None:
        """End a rollout: what follows each environment's last step is the value of [E, F]."""
        with self._precision():
            values = self.network(observations, self.hidden, self.buffer.next_starts).values
        self.buffer.compute_advantages_and_returns(
            values, self.config.gamma, self.config.gae_lambda
        )

    def update(self, clear_buffer: bool = True, accumulation_steps: int = 1) -> PPOUpdateMetrics:
        """Learn from the rollout; `accumulation_steps` splits the work, not the result."""
        if accumulation_steps < 1:
            raise AgreementError("Accumulation needs steps", given=accumulation_steps, valid="1 up")
        self.buffer.normalize_advantages()
        batch = self.buffer.get_batched_sequences(self.device)
        self.network.observe_returns(batch.returns, batch.valid)
        batch, matters, coefs, error = self._anchor(batch)

        tally = Tally()
        for rows in self._minibatches(len(batch.valid)):
            part = batch if rows is None else batch.rows(rows)
            if not self._step(part, coefs, accumulation_steps, tally):
                tally.stopped_by_kl = True
                break

        metrics = tally.report(
            self.space,
            batch,
            matters,
            error,
            self.network.return_scale,
            self.config.learning_rate,
        )
        if self.config.normalize_observations:
            self.network.observation_norm.observe(batch.states[batch.valid])
        if clear_buffer:
            self.buffer.reset()
        return metrics

    @torch.no_grad()
    def _anchor(self, batch: SequenceBatch) -> tuple[SequenceBatch, Tensor, Tensor, Tensor]:
        """The batch with recomputed log-probs and values as the reference for all epochs.

        Also: where heads mattered, the heads' entropy coefficients, and how far the stored
        log-probs were from the recomputed ones, as the largest |ratio - 1|.
        """
        evaluation = self._evaluate(batch)
        matters = mattered(self.space, batch)
        apart = torch.expm1(evaluation.log_probs - batch.log_probs).abs()
        error = apart.masked_fill(~batch.valid[..., None], 0.0).amax()
        coefs = entropy_coefficients(evaluation.entropies, matters, self.space, self.config)
        anchored = replace(batch, log_probs=evaluation.log_probs, values=evaluation.values)
        return anchored, matters, coefs, error

    def _minibatches(self, sequences: int) -> list[Tensor | None]:
        """Rows of every minibatch of the update; None stands for all of them."""
        if self.config.minibatches == 1:
            return [None] * self.config.epochs
        return [
            rows
            for _ in range(self.config.epochs)
            for rows in torch.randperm(sequences, generator=self.shuffler).tensor_split(
                min(self.config.minibatches, sequences)
            )
        ]

    def _step(
        self, batch: SequenceBatch, coefs: Tensor, accumulation_steps: int, tally: Tally
    ) -> bool:
        """One optimiser step; False where the policy has already moved too far to take it."""
        share = shares(mattered(self.space, batch), batch.valid, self.config)
        terms: Terms | None = None
        for part in _split(batch, accumulation_steps):
            some = ppo_terms(
                self.space,
                part,
                self._evaluate(part),
                share,
                self.network.return_scale,
                self.config,
            )
            terms = some if terms is None else terms.plus(some)
            if self._moved_too_far(terms):
                # More parts could only add to the divergence: each one's is at least 0.
                tally.measured.append(terms)
                self.optimizer.zero_grad()
                return False
            total_loss(some, coefs, self.config).backward()
        assert terms is not None
        tally.measured.append(terms)
        tally.norms.append(self._clip_gradients())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return True

    def _moved_too_far(self, terms: Terms) -> bool:
        limit = self.config.target_kl
        return limit is not None and bool(terms.kl.sum() > KL_STOP_FACTOR * limit)

    def _evaluate(self, batch: SequenceBatch) -> Evaluation:
        with self._precision():
            return self.network.evaluate_actions(
                batch.states, batch.actions, batch.masks, batch.hidden, batch.starts
            )

    def _clip_gradients(self) -> GradientNorms:
        grads = [[p.grad for p in group if p.grad is not None] for group in self._groups]
        norms = torch.stack([nn.utils.get_total_norm(group) for group in grads])
        total = norms.norm()
        nn.utils.clip_grads_with_norm_(
            self.network.parameters(), self.config.max_grad_norm, total, foreach=True
        )
        return GradientNorms(norms[:-2], norms[-2], total)

    def _precision(self) -> AbstractContextManager[object]:
        if not self.config.bf16:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

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
    ) -> "PPOAgent":
        """The agent that was saved; refused if it does not fit the given space or state."""
        saved = read_agent(path, space, state_dim)
        sizes = {"lstm_hidden_dim": saved.lstm_hidden_dim, "lstm_layers": saved.lstm_layers}
        agent = cls.build(
            saved.space,
            saved.state_dim,
            saved.envs,
            saved.steps,
            saved.config,
            seed=saved.seed,
            device=device,
            **sizes,
        )
        restore_agent(agent, saved)
        return agent


def _optimizer(network: FactoredRecurrentActorCritic, config: PPOConfig) -> torch.optim.AdamW:
    """Weight decay on the value head only: it would pull trunk and policy towards uniform.

    The fused form is the fastest on the CPU too: half the time of the foreach form.
    """
    critic = list(network.value_head.parameters())
    inside = {id(parameter) for parameter in critic}
    rest = [parameter for parameter in network.parameters() if id(parameter) not in inside]
    groups = [
        {"params": rest, "weight_decay": 0.0},
        {"params": critic, "weight_decay": config.value_weight_decay},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, eps=config.adam_eps, fused=True)


def _split(batch: SequenceBatch, parts: int) -> list[SequenceBatch]:
    """The batch in that many parts of whole sequences, or as many as it has sequences."""
    sequences = len(batch.valid)
    parts = min(parts, sequences)
    if parts == 1:
        return [batch]
    return [batch.rows(rows) for rows in torch.arange(sequences).tensor_split(parts)]
