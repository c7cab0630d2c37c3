"""One update: a reference, optimiser steps on whole sequences, and what is reported of them.

Shapes: `R` sequences, `T` time, `H` heads, `K` optimiser steps.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from esper.leyline.constants import (
    KL_STOP_FACTOR,
    STORED_LOG_PROB_TOLERANCE,
    STORED_LOG_PROB_TOLERANCE_BF16,
    STORED_LOG_PROB_TOLERANCE_TF32,
)
from esper.leyline.errors import EsperError
from esper.leyline.results import PPOUpdateMetrics
from esper.simic.agent.losses import (
    Shares,
    Terms,
    entropy_coefficients,
    ppo_terms,
    shares,
    step_counts,
    total_loss,
)
from esper.simic.agent.metrics import GradientNorms, Tally, fetched
from esper.simic.agent.rollout_buffer import RolloutError
from esper.simic.agent.settings import PPOConfig
from esper.simic.agent.types import SequenceBatch
from esper.tamiyo.network import FactoredRecurrentActorCritic

if TYPE_CHECKING:
    from esper.simic.agent.ppo import PPOAgent


class StoredLogProbError(EsperError):
    """Log-probs of a rollout that its update does not find again."""


class Update:
    """One update of an agent; every process that learns with it makes the same steps.

    With several processes, minibatch j of the whole is what their minibatches j are together.
    """

    def __init__(self, agent: "PPOAgent", accumulation_steps: int) -> None:
        self.agent, self.parts = agent, accumulation_steps
        self.config, self.processes = agent.config, agent.processes
        self.network, self.space = agent.network, agent.space
        self.tally = Tally(agent.space, agent.processes, tolerance(agent.device, agent.config))

    def run(self) -> PPOUpdateMetrics:
        """Learn from the rollout that the agent's buffer holds."""
        agent, summed = self.agent, self.processes.sum_
        agent.buffer.normalize_advantages(self.processes)
        batch = agent.buffer.get_batched_sequences(
            agent.device, allow_empty=self.processes.size > 1
        )
        sequences = self.processes.largest(len(batch.valid), agent.device)
        if not sequences:
            raise RolloutError("The rollouts of all processes are empty", fix="add steps first")
        self.network.observe_returns(batch.returns, batch.valid, summed)
        batch, self.coefs, error = self._anchored(batch)
        if self.config.strict:
            self._require_agreement(error)

        minibatches = self._minibatches(len(batch.valid), min(self.config.minibatches, sequences))
        counts = self._counts(batch, minibatches)
        for rows, count in zip(minibatches, counts, strict=True):
            part = batch if rows is None else batch.rows(rows)
            if not self._step(part, shares(count, self.config)):
                self.tally.stopped_by_kl = True
                break

        total = counts[0] if minibatches[0] is None else summed(step_counts(batch).sum(0))
        metrics = self.tally.report(
            batch, total, error, self.network.return_scale, self.config.learning_rate
        )
        if self.config.normalize_observations:
            self.network.observation_norm.observe(batch.states, batch.valid, summed)
        return metrics

    @torch.no_grad()
    def _anchored(self, batch: SequenceBatch) -> tuple[SequenceBatch, Tensor, Tensor]:
        """The batch with recomputed log-probs and values as the reference for all epochs.

        Also: the heads' entropy coefficients, and how far the stored log-probs were from the
        recomputed ones, as the largest |ratio - 1|.
        """
        error = torch.zeros((), device=batch.valid.device)
        entropies = torch.zeros_like(batch.log_probs)
        if len(batch.valid):
            evaluation = self.agent.evaluate(batch)
            entropies = evaluation.entropies
            apart = torch.expm1(evaluation.log_probs - batch.log_probs).abs()
            error = apart.masked_fill(~batch.valid[..., None], 0.0).amax()
            batch = replace(batch, log_probs=evaluation.log_probs, values=evaluation.values)
        coefs = entropy_coefficients(
            entropies, batch.matters, self.space, self.config, self.processes
        )
        return batch, coefs, self.processes.max_(error)

    def _require_agreement(self, error: Tensor) -> None:
        (found,) = fetched(error[None])
        if not found < self.tally.tolerance:
            raise StoredLogProbError(
                "The log-probs stored during the rollout are not those that the update finds",
                given=f"|ratio - 1| up to {found:.3g}",
                valid=f"below {self.tally.tolerance:g}",
                fix="look for hidden states, masks, episode starts or a precision that differ "
                "between acting and learning",
            )

    def _minibatches(self, sequences: int, count: int) -> list[Tensor | None]:
        """Rows of every minibatch of the update; None stands for all of them."""
        if count == 1:
            return [None] * self.config.epochs
        return [
            rows
            for _ in range(self.config.epochs)
            for rows in torch.randperm(sequences, generator=self.agent.shuffler).tensor_split(count)
        ]

    def _counts(self, batch: SequenceBatch, minibatches: list[Tensor | None]) -> list[Tensor]:
        """[H + 1] for each minibatch: in how many steps of all processes each head mattered."""
        each = step_counts(batch)
        if minibatches[0] is None:
            return [self.processes.sum_(each.sum(0))] * len(minibatches)
        picked = [
            each[rows.to(each.device, non_blocking=True)].sum(0)
            for rows in minibatches
            if rows is not None
        ]
        return list(self.processes.sum_(torch.stack(picked)).unbind())

    def _step(self, batch: SequenceBatch, share: Shares) -> bool:
        """One optimiser step; False where the policy has already moved too far to take it."""
        terms, loss = None, None
        for part in _split(batch, self.parts):
            if loss is not None:
                loss.backward()
            some = ppo_terms(
                self.space,
                part,
                self.agent.evaluate(part),
                share,
                self.network.return_scale,
                self.config,
            )
            loss = total_loss(some, self.coefs, self.config)
            some = Terms(*(term.detach() for term in some))
            terms = some if terms is None else terms.plus(some)
        if terms is None:
            terms = Terms.nothing(len(self.space), batch.valid.device)
        self.tally.measured.append(terms)
        if self._moved_too_far(terms):
            self.agent.optimizer.zero_grad()
            return False
        if loss is not None:
            loss.backward()
        self.processes.sum_gradients(self.network.parameters())
        self.tally.norms.append(self._clip_gradients())
        self.agent.optimizer.step()
        self.agent.optimizer.zero_grad()
        return True

    def _moved_too_far(self, terms: Terms) -> bool:
        """Needs the number itself: one wait for the device at each step that has a limit."""
        limit = self.config.target_kl
        if limit is None:
            return False
        (kl,) = fetched(self.processes.sum_(terms.kl.sum()[None]))
        return kl > KL_STOP_FACTOR * limit

    def _clip_gradients(self) -> GradientNorms:
        groups = [[p.grad for p in g if p.grad is not None] for g in self.agent.gradient_groups]
        each = torch.stack(torch._foreach_norm([grad for group in groups for grad in group]))
        norms = torch.stack([part.norm() for part in each.split([len(group) for group in groups])])
        total = norms.norm()
        nn.utils.clip_grads_with_norm_(self.network.parameters(), self.config.max_grad_norm, total)
        return GradientNorms(norms[:-2], norms[-2], total)


def tolerance(device: torch.device, config: PPOConfig) -> float:
    """How far stored and recomputed log-probs may be apart in the precision that is in use."""
    if config.bf16:
        return STORED_LOG_PROB_TOLERANCE_BF16
    backends = torch.backends
    if device.type == "cuda" and (backends.cudnn.allow_tf32 or backends.cuda.matmul.allow_tf32):
        return STORED_LOG_PROB_TOLERANCE_TF32
    return STORED_LOG_PROB_TOLERANCE


def optimizer(network: FactoredRecurrentActorCritic, config: PPOConfig) -> torch.optim.AdamW:
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
    return (
        [batch.rows(rows) for rows in torch.arange(sequences).tensor_split(parts)] if parts else []
    )
