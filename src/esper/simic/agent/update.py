"""One update of PPO: losses head by head, optimiser steps on whole sequences, and its report.

What a step weighs in an average is one over the count of the *whole* batch, taken over all
processes and before the batch is split. So losses are sums that micro-batches and processes add
up to, and the result depends on neither. Numbers stay on the device until the report fetches them.

Shapes: `R` sequences, `T` time, `H` heads, `K` optimiser steps.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from esper.leyline import ActionSpace, EsperError, constants
from esper.leyline.results import HeadGradientNorms, HeadUpdateMetrics, PerHead, PPOUpdateMetrics
from esper.simic.agent.ppo_config import PPOConfig
from esper.simic.agent.processes import ALONE, Processes
from esper.simic.agent.rollout_buffer import NonFiniteError, RolloutError, TamiyoRolloutBuffer
from esper.simic.agent.types import SequenceBatch
from esper.tamiyo.network import Evaluation, RecurrentActorCritic

PROBED = 2  # sequences that are looked at once more after an update
STATES_AT_ONCE = 2**25  # numbers that are seen together without learning from them


class StoredLogProbError(EsperError):
    """Log-probs of a rollout that its update does not find again."""


# --- losses ----------------------------------------------------------------------------------


class Shares(NamedTuple):
    """What one step weighs in an average."""

    head: Tensor  # [..., H] for the surrogate and the entropy of a head
    step: Tensor  # [...] for averages over all steps


class Terms(NamedTuple):
    """Contributions of a (micro-)batch; those of its parts add up, extremes apart."""

    policy: Tensor  # [H] surrogate, averaged
    bonus: Tensor  # [H] entropy, averaged as the surrogate is
    value: Tensor  # [1] averaged over all steps
    kl: Tensor  # [H] averaged over all steps
    entropy: Tensor  # [H] this and the next two summed over the steps where the head mattered
    clipped: Tensor  # [H]
    ratio: Tensor  # [H]
    ratio_min: Tensor  # [H]
    ratio_max: Tensor  # [H]

    @classmethod
    def nothing(cls, heads: int, device: torch.device) -> "Terms":
        """The contributions of no steps at all."""
        none, one = torch.zeros(heads, device=device), torch.ones(heads, device=device)
        return cls(none, none, none[:1], none, none, none, none, one, one)

    def plus(self, other: "Terms") -> "Terms":
        summed = Terms(*(one + more for one, more in zip(self, other, strict=True)))
        return summed._replace(
            ratio_min=torch.minimum(self.ratio_min, other.ratio_min),
            ratio_max=torch.maximum(self.ratio_max, other.ratio_max),
        )


def step_counts(batch: SequenceBatch) -> Tensor:
    """[R, H + 1]: in how many steps of each sequence a head mattered; last, all its steps."""
    return torch.cat((batch.matters, batch.valid[..., None]), -1).sum(1)


def shares(step_counts: Tensor, config: PPOConfig) -> Shares:
    """Weights from counts [..., H + 1] of batches; a floor lets a lone step weigh little."""
    counts, steps = step_counts[..., :-1], step_counts[..., -1:].clamp(min=1)
    floored = counts.clamp(min=1).maximum(steps * constants.HEAD_COUNT_FLOOR)
    per_head = floored if config.head_average == "relevant" else steps.expand_as(counts)
    return Shares(1.0 / per_head, 1.0 / steps[..., 0])


def entropy_coefficients(
    entropies: Tensor,
    matters: Tensor,
    space: ActionSpace,
    config: PPOConfig,
    processes: Processes = ALONE,
) -> Tensor:
    """[H]: the configured coefficient divided among the heads; 0 where a target is met.

    `entropies` are relative to the legal actions of each step, so a target of 0.3 asks for 30 %
    of what the real masks allow. Decided once an update, from all its steps.
    """
    kept = torch.stack((entropies.masked_fill(~matters, 0.0), matters.to(entropies)))
    total = processes.sum_(kept.sum((1, 2)))  # [2, H]
    mean = total[0] / total[1].clamp(min=1)
    targets = [
        config.entropy_targets.get(name, constants.DEFAULT_ENTROPY_TARGET) for name in space.names
    ]
    below = mean < torch.tensor(targets).to(mean.device, non_blocking=True)
    return below * (config.entropy_coef / len(space))


def ppo_terms(
    batch: SequenceBatch,
    evaluation: Evaluation,
    share: Shares,
    return_scale: Tensor,
    config: PPOConfig,
) -> Terms:
    """Clipped surrogate and entropy of each head, value loss, and what is reported of them.

    `batch.log_probs` and `batch.values` are the reference from before the first step.
    """
    with torch.no_grad():
        closed, bound = ~batch.matters, constants.LOG_RATIO_CLAMP
        moved = (evaluation.log_probs - batch.log_probs).masked_fill_(closed, 0.0)
        log_ratio = moved.clamp(-bound, bound)
        ratio = log_ratio.exp()
        weights = batch.advantages[..., None] * share.head * batch.matters
        # The lesser of what the ratio and the clipped one promise: no more than the far bound does,
        # which is 0 or infinite on the other side.
        least = (weights < 0) * (1 - config.clip_ratio)
        most = (1 + config.clip_ratio) / (weights > 0)
        limited = ratio.clamp(least, most)
        surrogate = -weights * limited
        free = (limited == ratio) & (moved == log_ratio)

        error = (evaluation.values - batch.returns) / return_scale
        step = (evaluation.values - batch.values) / return_scale
        bounded = error + (step.clamp(-config.value_clip, config.value_clip) - step)
        worse = torch.where(error.abs() >= bounded.abs(), error, bounded)
        worse.masked_fill_(~batch.valid, 0.0)

        low, high = ratio.flatten(0, 1).aminmax(dim=0)  # 1 where the head did not matter
        off = ratio - 1
        clipped = off.abs() > config.clip_ratio
        observed = torch.stack((off - log_ratio, clipped, ratio, evaluation.entropies))
        kl, clipped, mean, entropy = observed.masked_fill_(closed, 0.0).sum((1, 2)).unbind()
        value = 0.5 * worse.square().sum()[None] * share.step
        slopes = (
            surrogate * free,  # a ratio grows by itself
            share.head * batch.matters,
            worse * (worse == error) * (share.step / return_scale),
        )
        sums = (surrogate.sum((0, 1)), entropy * share.head, value)
    policy, bonus, value = Known.apply(*evaluation, sums, slopes)  # type: ignore[no-untyped-call]
    return Terms(policy, bonus, value, kl * share.step, entropy, clipped, mean, low, high)


class Known(torch.autograd.Function):
    """Sums over steps with slopes that are known: a graph of the many small operations that lead to
    them would take as long again as they."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        """Of log-probs, entropies and values: the sums, and what each step adds to its own."""
        *_, sums, ctx.slopes = given
        return cast(tuple[Tensor, ...], sums)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        slopes = (part * slope for part, slope in zip(outer, ctx.slopes, strict=True))
        return (*slopes, None, None)


def total_loss(terms: Terms, entropy_coefs: Tensor, config: PPOConfig) -> Tensor:
    bonus = (entropy_coefs * terms.bonus).sum()
    return terms.policy.sum() + config.value_coef * terms.value[0] - bonus


# --- steps -----------------------------------------------------------------------------------


class GuardedAdamW:
    """AdamW in torch's fused form, which takes no step into numbers that are not finite.

    Decided on the device, as for torch's gradient scaler, and so not waited for: weights and
    moments stay what they are, and the caller says so when it next waits anyway. The kernel also
    shrinks the gradients. On the CPU it is the fastest form too, and one count of steps for all
    parameters spares an operation for each.
    """

    def __init__(self, network: RecurrentActorCritic, config: PPOConfig) -> None:
        """Weight decay on the value head only: it would pull trunk and policy towards uniform."""
        self.eps = config.adam_eps
        # All that is to be kept, zero before the first step.
        self.moments = {"steps": torch.zeros((), device=network.return_scale.device)}
        # Parameters with their moments, by how they decay.
        self.groups: dict[float, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for name, parameter in network.named_parameters():
            mean, square = (torch.zeros_like(parameter, requires_grad=False) for _ in range(2))
            self.moments |= {f"{name}.mean": mean, f"{name}.square": square}
            decay = config.value_weight_decay if name.startswith("value_head.") else 0.0
            self.groups.setdefault(decay, []).append((parameter, mean, square))

    @torch.no_grad()
    def step_unless(self, broken: Tensor, rate: float, shrink: Tensor | None = None) -> None:
        """One step with the gradients over `shrink` [], unless `broken` [] bool; the gradients are
        used up in either case."""
        stopped, steps = broken.float(), self.moments["steps"]
        scale = None if shrink is None else shrink.to(stopped)  # the kernel wants float32
        steps += 1 - stopped
        for decay, group in self.groups.items():
            taken = [each for each in group if each[0].grad is not None]
            parameters, means, squares = (list(each) for each in zip(*taken, strict=True))
            torch._fused_adamw_(
                parameters,
                [parameter.grad for parameter in parameters],
                means,
                squares,
                [],
                [steps] * len(taken),
                lr=rate,
                beta1=0.9,
                beta2=0.999,
                weight_decay=decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=scale,
                found_inf=stopped,
            )
            for parameter in parameters:
                parameter.grad = None


def precision(config: PPOConfig, device: torch.device) -> AbstractContextManager[object]:
    """What acting and learning compute in."""
    return torch.autocast(device.type, torch.bfloat16) if config.bf16 else nullcontext()


def tolerance(config: PPOConfig, device: torch.device) -> float:
    """How far stored and recomputed log-probs may be apart in the precision that is in use."""
    if config.bf16:
        return constants.STORED_LOG_PROB_TOLERANCE_BF16
    backends = torch.backends
    if device.type == "cuda" and (backends.cudnn.allow_tf32 or backends.cuda.matmul.allow_tf32):
        return constants.STORED_LOG_PROB_TOLERANCE_TF32
    return constants.STORED_LOG_PROB_TOLERANCE


def fetched(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """The numbers [] or [n] themselves: the one place where an update waits for the device."""
    rows = [tensor.double().flatten() for tensor in tensors.values()]
    numbers = iter(torch.cat(rows).tolist())
    return {name: list(islice(numbers, len(row))) for name, row in zip(tensors, rows, strict=True)}


class Update:
    """One update of a network; every process that learns with it makes the same steps.

    With several processes, minibatch j of the whole is what their minibatches j are together.
    """

    def __init__(
        self,
        network: RecurrentActorCritic,
        optimizer: GuardedAdamW,
        config: PPOConfig,
        *,
        parts: int = 1,
        shuffler: torch.Generator | None = None,
        processes: Processes = ALONE,
    ) -> None:
        """`parts`: how many micro-batches a minibatch is computed in."""
        self.network, self.optimizer, self.config = network, optimizer, config
        self.parts, self.shuffler, self.processes = parts, shuffler, processes
        self.space, self.device = network.space, network.return_scale.device
        self.tolerance = tolerance(config, self.device)
        # Parameters whose gradient norms are reported: of each head, of the value head, the rest.
        self._groups = [list(part.parameters()) for part in (*network.heads, network.value_head)]
        apart = {id(parameter) for group in self._groups for parameter in group}
        self._groups.append([p for p in network.parameters() if id(p) not in apart])
        self._measured: list[Terms] = []  # of every step that was begun
        self._norms: list[Tensor] = []  # [H + 2] of every step taken: heads, value head, all
        # [] bool: has a loss or gradient not been finite? No step is taken from there on.
        self._broken = torch.zeros((), dtype=torch.bool, device=self.device)
        self._sound = torch.zeros((), dtype=torch.int64, device=self.device)  # [] steps before

    def run(self, buffer: TamiyoRolloutBuffer) -> PPOUpdateMetrics:
        """Learn from a rollout; what is not sound in it is refused before anything changes."""
        summed = self.processes.sum_
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        batch = buffer.get_batched_sequences(
            self.device, processes=self.processes, length=self.config.sequence
        )
        place = self.processes.place(len(batch.valid), self.device)
        if not place[1]:
            raise RolloutError("The rollouts of all processes are empty", fix="add steps first")
        buffer.spend()
        self.network.observe_returns(batch.returns, batch.valid, summed)
        batch, self._coefs, error = self._anchored(batch)
        if self.config.strict and not (off := fetched({"": error})[""][0]) < self.tolerance:
            raise StoredLogProbError(
                "The log-probs stored during the rollout are not those that the update finds",
                given=f"|ratio - 1| up to {off:.3g}",
                valid=f"below {self.tolerance:g}",
                fix="look for hidden states, masks, episode starts or a precision that differ "
                "between acting and learning",
            )
        minibatches = self._minibatches(len(batch.valid), place)
        counts = self._counts(batch, minibatches)
        weights = map(Shares, *(each.unbind() for each in shares(counts, self.config)))
        single = cache(lambda row: batch.rows(torch.tensor([row])))  # not copies
        for rows, share in zip(minibatches, weights, strict=True):
            if rows is None:
                part = batch
            else:
                part = single(int(rows)) if len(rows) == 1 else batch.rows(rows)
            if not self._step(part, share):
                break

        figures = self._figures(batch, counts, error)
        signs = self._signs(batch)
        found = fetched(figures | signs)
        if found["broken"][0]:
            raise self._what_is_not_finite(batch, minibatches, buffer)
        if wrong := [name for name in signs if found[name][0]]:
            fix = "go on from the agent before this update, with a smaller learning rate"
            what = "What was learned is NaN or infinite, or leads to it"
            raise NonFiniteError(what, given=", ".join(wrong[:3]), fix=fix)
        if self.config.normalize_observations:
            self.network.observation_norm.observe(batch.states, batch.valid, summed)
        return self._report(found)

    @torch.no_grad()
    def _signs(self, batch: SequenceBatch) -> dict[str, Tensor]:
        """[1] bool by name: is what the update came to not finite in some process, or so large that
        what follows from it is not?"""
        held = {**self.network.state_dict(), **self.optimizer.moments}
        held |= {"log-probs": batch.log_probs, "values": batch.values}
        if len(batch.valid):
            few = self.evaluate(batch.rows(torch.arange(min(PROBED, len(batch.valid)))))
            held |= {"log-probs": few.log_probs, "values": few.values}
        # Sums of sizes are not finite where one of them is not, and take few operations.
        sizes = torch._foreach_norm(list(held.values()), 1, dtype=torch.float64)
        flags = ~torch.stack(sizes).isfinite()
        return dict(zip(held, self.processes.max_(flags.float()).split(1), strict=True))

    def evaluate(self, batch: SequenceBatch) -> Evaluation:
        """The batch's decisions, seen with the present weights; carries gradient."""
        with precision(self.config, self.device):
            return self.network.evaluate_actions(
                batch.states, batch.actions, batch.masks, batch.hidden, batch.starts
            )

    def _evaluate_all(self, batch: SequenceBatch) -> Evaluation:
        """The same in parts: a large rollout with all its activations would not fit."""
        parts = max(self.parts, -(-batch.states.numel() // STATES_AT_ONCE))
        found = [self.evaluate(part) for part in _split(batch, parts)]
        if len(found) == 1:
            return found[0]
        return Evaluation(*(torch.cat(each) for each in zip(*found, strict=True)))

    @torch.no_grad()
    def _anchored(self, batch: SequenceBatch) -> tuple[SequenceBatch, Tensor, Tensor]:
        """The batch with recomputed log-probs and values as the reference for all epochs.

        Also: the heads' entropy coefficients, and how far the stored log-probs were from the
        recomputed ones, as the largest |ratio - 1|.
        """
        error = torch.zeros((), device=self.device)
        entropies = torch.zeros_like(batch.log_probs)
        if len(batch.valid):
            evaluation = self._evaluate_all(batch)
            entropies = evaluation.entropies
            apart = torch.expm1(evaluation.log_probs - batch.log_probs).abs()
            error = apart.masked_fill(~batch.valid[..., None], 0.0).amax()
            batch = replace(batch, log_probs=evaluation.log_probs, values=evaluation.values)
        coefs = entropy_coefficients(
            entropies, batch.matters, self.space, self.config, self.processes
        )
        return batch, coefs, self.processes.max_(error)

    def _minibatches(self, own: int, place: tuple[int, int]) -> list[Tensor | None]:
        """Rows of every minibatch of the update; None stands for all of them.

        The sequences of all processes are shuffled as one, and each process has its own of them.
        """
        found: list[Tensor | None] = []
        first, sequences = place
        count = min(self.config.minibatches, sequences)
        if count == 1:
            return [None] * self.config.epochs
        for _ in range(self.config.epochs):
            order = torch.randperm(sequences, generator=self.shuffler) - first
            found += [rows[(rows >= 0) & (rows < own)] for rows in order.tensor_split(count)]
        return found

    def _counts(self, batch: SequenceBatch, minibatches: list[Tensor | None]) -> Tensor:
        """[K, H + 1]: in how many steps of all processes each head mattered, by minibatch."""
        each = step_counts(batch)
        picked = [
            each if rows is None else each[rows.to(self.device, non_blocking=True)]
            for rows in minibatches
        ]
        return self.processes.sum_(torch.stack([counts.sum(0) for counts in picked]))

    def _step(self, batch: SequenceBatch, share: Shares) -> bool:
        """One optimiser step; False where the policy has already moved too far to take it."""
        terms, loss = None, None
        for part in _split(batch, self.parts):
            if loss is not None:
                loss.backward()
            scale = self.network.return_scale
            some = ppo_terms(part, self.evaluate(part), share, scale, self.config)
            loss = total_loss(some, self._coefs, self.config)
            some = Terms(*(term.detach() for term in some))
            terms = some if terms is None else terms.plus(some)
        terms = terms or Terms.nothing(len(self.space), self.device)
        self._measured.append(terms)
        if (limit := self.config.target_kl) is not None:
            # Needs the number itself: one wait for the device at each step that has a limit.
            (kl,) = fetched({"kl": self.processes.sum_(terms.kl.sum())})["kl"]
            if kl > constants.KL_STOP_FACTOR * limit:
                self.network.zero_grad()
                return False
        if loss is not None:
            loss.backward()
        self.processes.sum_gradients(self.network.parameters())
        # [H + 2]: the norms of the gradients of every head, of the value head and of all.
        groups = [[p.grad for p in group if p.grad is not None] for group in self._groups]
        each = torch.stack(torch._foreach_norm([grad for group in groups for grad in group]))
        parts = each.split([len(group) for group in groups])
        norms = torch.stack(torch._foreach_norm([*parts[:-1], each]))
        whole = norms[-1] + torch.cat((terms.policy, terms.value, terms.bonus)).sum()
        self._broken = self._broken | self.processes.max_((~whole.isfinite()).float()).bool()
        self._sound = self._sound + ~self._broken
        self._norms.append(norms)
        shrink = (norms[-1] / self.config.max_grad_norm).clamp(min=1)
        self.optimizer.step_unless(self._broken, self.config.learning_rate, shrink)
        return True

    # --- the report --------------------------------------------------------------------------

    def _report(self, found: Mapping[str, list[float]]) -> PPOUpdateMetrics:
        """The metrics of all processes together, from their numbers."""
        names, values = self.space.names, {name: numbers[0] for name, numbers in found.items()}
        heads = {
            head: {name: found[f"head {name}"][place] for name in HeadUpdateMetrics.__annotations__}
            for place, head in enumerate(names)
        }
        norms = dict(zip(names, found["head gradient_norm"], strict=True))
        metrics: dict[str, object] = {
            **values,
            "gradient_norms": HeadGradientNorms(PerHead(names, norms), values["value_head"]),
            "valid_steps": int(values["valid_steps"]),
            "learning_rate": self.config.learning_rate,
            "stored_log_prob_tolerance": self.tolerance,
            "optimizer_steps": len(self._norms),
            "stopped_by_kl": len(self._norms) < len(self._measured),
            "peak_memory_bytes": (
                torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
            ),
            "heads": PerHead(names, heads),
        }
        return cast(
            PPOUpdateMetrics, {name: metrics[name] for name in PPOUpdateMetrics.__annotations__}
        )

    def _figures(self, batch: SequenceBatch, counts: Tensor, error: Tensor) -> dict[str, Tensor]:
        """What is reported of all heads together, [] each, and of each head, [H] each.

        `counts` [K, H + 1] and `error` [] are those of all processes already.
        """
        # All steps' terms, [K, H] each, of all processes, in two messages: sums and extremes.
        *sums, low, high = (torch.stack(each) for each in zip(*self._measured, strict=True))
        summed = self.processes.sum_(torch.cat(sums, 1)).split([s.shape[1] for s in sums], 1)
        # The least is the largest of the opposites.
        opposite, high = self.processes.max_(torch.stack((-low, high))).unbind()
        every = Terms(**dict(zip(Terms._fields, (*summed, -opposite, high), strict=True)))
        norms = torch.zeros(len(self.space) + 2, device=self.device)
        if self._norms:
            norms = torch.stack(self._norms).mean(0)
        steps = counts.sum(0) // self.config.epochs  # every epoch sees every step once
        mattered = counts[: len(self._measured), :-1].sum(0).clamp(min=1)
        entropy = (every.entropy.sum(0) / mattered).clamp(max=1.0)  # not 1 and a rounding
        return {
            "policy_loss": every.policy.sum(1).mean(),
            "value_loss": every.value.mean(),
            "entropy": entropy.mean(),
            "kl": every.kl[-1].sum(),
            **_value_statistics(batch, self.processes),
            "return_scale": self.network.return_scale,
            "gradient_norm": norms[-1],
            "value_head": norms[-2],
            "stored_log_prob_error": error,
            "valid_steps": steps[-1],
            "broken": self._broken,
            "head loss": every.policy.mean(0),
            "head entropy": entropy,
            "head kl": every.kl[-1],
            "head clip_fraction": every.clipped.sum(0) / mattered,
            "head relevant_fraction": steps[:-1] / steps[-1],
            "head ratio_min": every.ratio_min.amin(0),
            "head ratio_mean": every.ratio.sum(0) / mattered,
            "head ratio_max": every.ratio_max.amax(0),
            "head gradient_norm": norms[:-2],
        }

    @torch.no_grad()
    def _what_is_not_finite(
        self, batch: SequenceBatch, minibatches: list[Tensor | None], buffer: TamiyoRolloutBuffer
    ) -> NonFiniteError:
        """Where it began, found by another look with the weights, which are those before it."""
        number = int(self._sound)
        rows = minibatches[number]
        part = batch if rows is None else batch.rows(rows)
        found = self._evaluate_all(part)
        suspects = {
            "log_probs": (part.matters & ~found.log_probs.isfinite()).any(-1),
            "values": part.valid & ~found.values.isfinite(),
        }
        where = "its gradient, or a step of another process"
        for name, wrong in suspects.items():
            if bool(wrong.any()):
                row, step = wrong.nonzero()[0].tolist()
                row = row if rows is None else int(rows[row])
                length = found.values.shape[1]
                row, cut = divmod(row, buffer.steps // length)  # sequences of one environment
                env = int(buffer.counts.nonzero()[row])
                where = f"{name} of environment {env}, step {cut * length + step}"
                break
        return NonFiniteError(
            f"The loss of optimiser step {number + 1} of {len(minibatches)} is NaN or infinite",
            given=where,
            fix="the weights are those before that step: lower the learning rate, or look at the "
            "size of rewards and observations",
        )


def _value_statistics(batch: SequenceBatch, processes: Processes) -> dict[str, Tensor]:
    """Explained variance, then mean and standard deviation of values and of returns."""
    numbers = torch.stack((batch.values, batch.returns, batch.returns - batch.values))  # [3, R, T]
    wide = numbers.double().masked_fill(~batch.valid, 0.0)
    count = batch.valid.sum().double()[None]
    total = processes.sum_(torch.cat((wide.sum((1, 2)), count)))
    count = total[3].clamp(min=1)
    mean = total[:3] / count
    centred = (wide - mean[:, None, None]).masked_fill(~batch.valid, 0.0)
    variance = processes.sum_(centred.square().sum((1, 2))) / count
    explained = torch.where(variance[1] > 0, 1 - variance[2] / variance[1].clamp(min=1e-12), 0.0)
    return {
        "explained_variance": explained,
        "value_mean": mean[0],
        "value_std": variance[0].sqrt(),
        "return_mean": mean[1],
        "return_std": variance[1].sqrt(),
    }


def _split(batch: SequenceBatch, parts: int) -> list[SequenceBatch]:
    """The batch in that many parts of whole sequences, or as many as it has sequences."""
    parts = min(parts, len(batch.valid))
    if parts <= 1:
        return [batch] * parts
    return [batch.rows(rows) for rows in torch.arange(len(batch.valid)).tensor_split(parts)]
