"""One PPO update: recompute, check, epochs of minibatches, loss, backward, clip, step, metrics.

Minibatches consist of whole sequences. The weight of a step in a mean is one over the number of
steps of its minibatch, in all micro-batches and all processes. Losses and gradients are therefore
sums, and the result depends neither on the number of micro-batches nor on the number of processes.
Numbers stay on the device until the metrics are fetched.

Shapes: `R` sequences, `T` time, `H` heads, `K` optimiser steps.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import cast

import torch
from torch import Tensor, nn

from esper.distributed import SINGLE_PROCESS, Processes
from esper.leyline import EsperError, constants
from esper.leyline.results import HeadGradientNorms, HeadUpdateMetrics, PerHead, PPOUpdateMetrics
from esper.simic.agent.advantages import compute_per_head_advantages
from esper.simic.agent.losses import LossStats, loss_weights, ppo_loss
from esper.simic.agent.ppo_config import PPOConfig
from esper.simic.agent.rollout_buffer import NonFiniteError, RolloutError, TamiyoRolloutBuffer
from esper.simic.agent.types import SequenceBatch
from esper.tamiyo.recurrent import Evaluation, RecurrentActorCritic

__all__ = ["StoredLogProbError", "build_optimizer", "update"]

CHECKED_SEQUENCES = 2  # sequences that are evaluated once more after an update
MAX_NUMBERS_AT_ONCE = 2**25  # state numbers that are evaluated together without gradient


class StoredLogProbError(EsperError):
    """Log-probabilities of the rollout that the update does not reproduce."""


def update(
    network: RecurrentActorCritic,
    optimizer: torch.optim.AdamW,
    buffer: TamiyoRolloutBuffer,
    config: PPOConfig,
    *,
    accumulation_steps: int = 1,
    shuffler: torch.Generator | None = None,
    processes: Processes = SINGLE_PROCESS,
) -> PPOUpdateMetrics:
    """Update the network once with the rollout in the buffer.

    Args:
        network: The network, not compiled or compiled in place.
        optimizer: Its optimiser; see `build_optimizer`.
        buffer: A rollout with computed advantages.
        config: Settings of the learner.
        accumulation_steps: Micro-batches into which every minibatch is split.
        shuffler: Random generator on the CPU for the order of sequences.
        processes: Processes that learn together. All of them call this function.

    Returns:
        Metrics of all processes together.

    Raises:
        RolloutError: The rollout is empty.
        NonFiniteError: A number of the rollout, a loss or a gradient is NaN or infinite.
        StoredLogProbError: With `config.strict`, if the rollout's log-probabilities differ from the
            recomputed ones.
    """
    device = network.return_scale.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for group in optimizer.param_groups:
        group["lr"] = config.lr

    # Check the rollout, normalise its advantages, and fetch it as sequences.
    batch = _fetch_rollout(buffer, config, device, processes)
    env_slice = processes.env_slice(len(batch), device)
    if env_slice[1] == 0:
        raise RolloutError("The rollouts of all processes are empty", fix="add steps first")
    buffer.mark_consumed()
    network.update_return_scale(batch.returns, batch.valid, processes.sum_)

    # Recompute log-probabilities and values; they are the reference of all epochs.
    batch, entropies, stored_log_prob_error = _recompute_old_log_probs(
        network, batch, config, accumulation_steps, processes
    )
    if config.strict:
        _check_stored_log_probs(stored_log_prob_error, config, device)
    entropy_coefs = _entropy_coefficients(entropies, batch.entropy_mask, network, config, processes)

    # All minibatches of all epochs, and the numbers of steps by which each is averaged.
    minibatches = _draw_minibatches(len(batch), env_slice, config, shuffler)
    counts = _count_steps(batch, minibatches, processes)  # [K, 2 H + 1]

    # Listed once: walking through the modules takes long for small networks.
    parameter_groups = _parameter_groups(network)
    parameters = list(network.parameters())

    progress = UpdateProgress(device)
    for rows, minibatch_counts in zip(minibatches, counts.unbind(), strict=True):
        minibatch = batch if rows is None else batch.select(rows)
        weights = loss_weights(minibatch_counts, config)

        # Loss of each micro-batch. The last backward pass waits for the KL divergence.
        loss = None
        stats = LossStats.zeros(len(network.action_space), device)
        for micro_batch in minibatch.split(accumulation_steps):
            if loss is not None:
                loss.backward()
            evaluation = _evaluate(network, micro_batch, config)
            head_advantages = _head_advantages(network, micro_batch)
            loss, micro_stats = ppo_loss(
                micro_batch,
                evaluation,
                head_advantages,
                weights,
                entropy_coefs,
                network.return_scale,
                config,
            )
            stats = stats + micro_stats
        progress.stats.append(stats)

        # KL early stop: skip this step and end the update.
        if config.target_kl is not None:
            kl = _to_host({"kl": processes.sum_(stats.kl.sum())})["kl"][0]
            if kl > constants.KL_EARLY_STOP_MULTIPLIER * config.target_kl:
                optimizer.zero_grad()
                progress.stopped_by_kl = True
                break
        if loss is not None:
            loss.backward()
        processes.sum_gradients(parameters)

        # Gradient norms, clipping, and one optimiser step unless a number is not finite.
        norms = _gradient_norms(parameter_groups, device)  # [H + 2]
        total_norm = norms[-1]
        _mark_nonfinite(progress, total_norm, stats, processes)
        with_gradient = [p for p in parameters if p.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(with_gradient, config.max_grad_norm, total_norm)
        step_optimizer(optimizer, progress.found_inf)
        progress.gradient_norms.append(norms)

    # Fetch all numbers at once, and reject the update if one of them is not finite.
    metrics = _collect_metrics(network, batch, counts, stored_log_prob_error, progress, config,
                               processes)  # fmt: skip
    nonfinite = _nonfinite_flags(network, optimizer, batch, config, processes)
    numbers = _to_host({**metrics, **{f"nonfinite {name}": f for name, f in nonfinite.items()}})
    if numbers["found_inf"][0]:
        raise _locate_nonfinite(network, batch, minibatches, buffer, progress, config)
    if broken := [name for name in nonfinite if numbers[f"nonfinite {name}"][0]]:
        raise NonFiniteError(
            "Weights or outputs are NaN or infinite after the update",
            given=", ".join(broken[:3]),
            fix="continue from the agent before this update, with a smaller learning rate",
        )
    if config.normalize_observations:
        network.observation_norm.observe(batch.states, batch.valid, processes.sum_)
    return _report(numbers, network, progress, config)


@dataclass
class UpdateProgress:
    """The optimiser steps of an update so far."""

    device: torch.device
    stats: list[LossStats] = field(default_factory=list)  # of every step that was begun
    gradient_norms: list[Tensor] = field(default_factory=list)  # [H + 2] of every step taken
    stopped_by_kl: bool = False
    found_inf: Tensor = field(init=False)  # [] bool: a number was not finite, no step follows
    finite_steps: Tensor = field(init=False)  # [] int64: steps before that

    def __post_init__(self) -> None:
        self.found_inf = torch.zeros((), dtype=torch.bool, device=self.device)
        self.finite_steps = torch.zeros((), dtype=torch.int64, device=self.device)


# --- before the first step ------------------------------------------------------------------------


def _fetch_rollout(
    buffer: TamiyoRolloutBuffer, config: PPOConfig, device: torch.device, processes: Processes
) -> SequenceBatch:
    """Check the rollout, normalise its advantages, and return it as sequences on the device."""
    is_single = processes.size == 1
    with processes.raise_on_all_ranks(buffer.device):
        if not buffer.max_length and is_single:  # `len` would wait for a GPU
            raise RolloutError("The rollout is empty", fix="add steps before you update")
        buffer.validate()
    buffer.normalize_advantages(processes)
    return buffer.get_batched_sequences(
        device, length=config.sequence_length, allow_empty=not is_single
    )


def autocast(config: PPOConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which the network acts and learns."""
    if config.bf16:
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def _evaluate(network: RecurrentActorCritic, batch: SequenceBatch, config: PPOConfig) -> Evaluation:
    """Evaluate the stored decisions with the current weights, with gradient."""
    with autocast(config, batch.states.device):
        return network.evaluate_actions(
            batch.states,
            batch.actions,
            batch.action_masks,
            batch.initial_hidden,
            batch.starts,
            entropy_masks=batch.entropy_masks,
            entropy_conditions=batch.entropy_conditions,
        )


@torch.no_grad()
def _recompute_old_log_probs(
    network: RecurrentActorCritic,
    batch: SequenceBatch,
    config: PPOConfig,
    accumulation_steps: int,
    processes: Processes,
) -> tuple[SequenceBatch, Tensor, Tensor]:
    """Replace the stored log-probabilities and values by recomputed ones.

    The ratio of the first epoch is then 1, up to the rounding of a pass without gradient.

    Returns:
        The batch, its entropies [R, T, H], and the largest |ratio − 1| between stored and
        recomputed log-probabilities in all processes.
    """
    error = torch.zeros((), device=batch.states.device)
    if not len(batch):
        return batch, torch.zeros_like(batch.log_probs), processes.max_(error)
    evaluation = _evaluate_in_parts(network, batch, config, accumulation_steps)
    ratio_minus_one = torch.expm1(evaluation.log_probs - batch.log_probs).abs()
    error = ratio_minus_one.masked_fill(~batch.valid[..., None], 0.0).amax()
    batch = replace(batch, log_probs=evaluation.log_probs, values=evaluation.values)
    return batch, evaluation.entropies, processes.max_(error)


def _evaluate_in_parts(
    network: RecurrentActorCritic, batch: SequenceBatch, config: PPOConfig, parts: int
) -> Evaluation:
    """Evaluate a batch in parts, because all activations of a large rollout would not fit."""
    parts = max(parts, -(-batch.states.numel() // MAX_NUMBERS_AT_ONCE))
    evaluations = [_evaluate(network, part, config) for part in batch.split(parts)]
    return Evaluation(*(torch.cat(tensors) for tensors in zip(*evaluations, strict=True)))


def stored_log_prob_tolerance(config: PPOConfig, device: torch.device) -> float:
    """Return the allowed |ratio − 1| of stored log-probabilities in the precision in use."""
    if config.bf16:
        return constants.STORED_LOG_PROB_TOLERANCE_BF16
    allows_tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    if device.type == "cuda" and allows_tf32:
        return constants.STORED_LOG_PROB_TOLERANCE_TF32
    return constants.STORED_LOG_PROB_TOLERANCE


def _check_stored_log_probs(error: Tensor, config: PPOConfig, device: torch.device) -> None:
    tolerance = stored_log_prob_tolerance(config, device)
    largest = _to_host({"error": error})["error"][0]
    if not largest < tolerance:
        raise StoredLogProbError(
            "The update does not reproduce the log-probabilities stored during the rollout",
            given=f"|ratio - 1| up to {largest:.3g}",
            valid=f"below {tolerance:g}",
            fix="look for hidden states, masks, episode starts or a precision that differ "
            "between acting and learning",
        )


def _entropy_coefficients(
    entropies: Tensor,
    entropy_mask: Tensor,
    network: RecurrentActorCritic,
    config: PPOConfig,
    processes: Processes,
) -> Tensor:
    """Return the entropy coefficient of each head, [H]; 0 where the head has reached its target.

    The configured coefficient is divided by the number of heads. Targets are shares of the largest
    entropy that the action masks allow. They are compared once per update, over all its steps.
    """
    space = network.action_space
    is_counted = entropy_mask.to(entropies)
    sums = torch.stack(((entropies * is_counted).sum((0, 1)), is_counted.sum((0, 1))))  # [2, H]
    sums = processes.sum_(sums)
    mean_entropies = sums[0] / sums[1].clamp(min=1)
    targets = torch.tensor(
        [config.entropy_targets.get(n, constants.DEFAULT_ENTROPY_TARGET) for n in space.names]
    )
    is_below_target = mean_entropies < targets.to(entropies.device, non_blocking=True)
    return is_below_target * (config.entropy_coef / len(space))


def _draw_minibatches(
    num_sequences: int,
    env_slice: tuple[int, int],
    config: PPOConfig,
    shuffler: torch.Generator | None,
) -> list[Tensor | None]:
    """Draw the sequences of every minibatch of all epochs; None stands for all sequences.

    The sequences of all processes are shuffled together. Each process gets the numbers of its
    sequences.
    """
    first, total = env_slice
    num_minibatches = min(config.minibatches, total)
    if num_minibatches == 1:
        return [None] * config.epochs
    minibatches: list[Tensor | None] = []
    for _ in range(config.epochs):
        order = torch.randperm(total, generator=shuffler) - first
        for rows in order.tensor_split(num_minibatches):
            is_local = (rows >= 0) & (rows < num_sequences)
            minibatches.append(rows[is_local])
    return minibatches


def _count_steps(
    batch: SequenceBatch, minibatches: list[Tensor | None], processes: Processes
) -> Tensor:
    """Count the steps of every minibatch by which its losses are averaged, over all processes.

    Returns:
        Counts [K, 2 H + 1]: steps in which each head was relevant, steps in which a legal op made
        it relevant, and all steps.
    """
    masks = torch.cat((batch.head_mask, batch.entropy_mask, batch.valid[..., None]), -1)
    counts_per_sequence = masks.sum(1)
    counts = []
    for rows in minibatches:
        if rows is None:
            counts.append(counts_per_sequence.sum(0))
        else:
            index = rows.to(batch.states.device, non_blocking=True)
            counts.append(counts_per_sequence[index].sum(0))
    return processes.sum_(torch.stack(counts))


def _head_advantages(network: RecurrentActorCritic, batch: SequenceBatch) -> Tensor:
    """Return the advantages of every head [R, T, H], 0 where the head had no influence."""
    by_head = compute_per_head_advantages(
        batch.advantages, batch.actions[..., 0], network.action_space
    )
    head_advantages = torch.stack(tuple(by_head.values()), dim=-1)
    return head_advantages.masked_fill(~batch.head_mask, 0.0)


# --- optimiser ------------------------------------------------------------------------------------


def build_optimizer(network: RecurrentActorCritic, config: PPOConfig) -> torch.optim.AdamW:
    """Return AdamW in its fused form, with weight decay on the value head only.

    Weight decay would pull the trunk and the policy heads towards the uniform policy. The fused
    form is used on the CPU too, because only this form skips a step on the device (`found_inf`).
    """
    value_head = list(network.value_head.parameters())
    is_value_head = {id(parameter) for parameter in value_head}
    others = [p for p in network.parameters() if id(p) not in is_value_head]
    optimizer = torch.optim.AdamW(
        [
            {"params": others, "weight_decay": 0.0},
            {"params": value_head, "weight_decay": config.value_weight_decay},
        ],
        lr=config.lr,
        eps=config.adam_eps,
        fused=True,
    )
    # Create the state now, so that an agent can be saved and restored before its first step.
    for parameter in network.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def step_optimizer(optimizer: torch.optim.AdamW, found_inf: Tensor) -> None:
    """Take one step unless `found_inf` [] bool; weights and moments then stay unchanged.

    `found_inf` is set as `torch.amp.GradScaler` sets it. Nothing waits for the device.
    """
    optimizer.found_inf = found_inf.float()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad()


def _parameter_groups(network: RecurrentActorCritic) -> list[list[nn.Parameter]]:
    """Return the parameters of every head, of the value head, and all others."""
    groups = [list(network.heads[name].parameters()) for name in network.action_space.names]
    groups.append(list(network.value_head.parameters()))
    in_a_head = {id(parameter) for group in groups for parameter in group}
    groups.append([p for p in network.parameters() if id(p) not in in_a_head])
    return groups


def _gradient_norms(groups: list[list[nn.Parameter]], device: torch.device) -> Tensor:
    """Return the gradient norms of every head, of the value head and of all parameters, [H + 2]."""
    norms = torch.stack([_norm(group, device) for group in groups])
    return torch.cat((norms[:-1], torch.linalg.vector_norm(norms)[None]))


def _norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).to(device)


def _mark_nonfinite(
    progress: UpdateProgress, total_norm: Tensor, stats: LossStats, processes: Processes
) -> None:
    """Set `found_inf` if the gradient or the loss of this step is not finite in some process."""
    checked = total_norm + stats.policy_loss.sum() + stats.value_loss + stats.entropy_bonus.sum()
    is_nonfinite = processes.max_((~checked.isfinite()).float()).bool()
    progress.found_inf = progress.found_inf | is_nonfinite
    progress.finite_steps = progress.finite_steps + ~progress.found_inf


# --- after the last step --------------------------------------------------------------------------


def _to_host(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Fetch tensors [] or [n] as numbers: the only place where an update waits for the device."""
    rows = [tensor.double().flatten() for tensor in tensors.values()]
    numbers = iter(torch.cat(rows).tolist())
    return {name: list(islice(numbers, len(row))) for name, row in zip(tensors, rows, strict=True)}


@torch.no_grad()
def _nonfinite_flags(
    network: RecurrentActorCritic,
    optimizer: torch.optim.AdamW,
    batch: SequenceBatch,
    config: PPOConfig,
    processes: Processes,
) -> dict[str, Tensor]:
    """Return, by name, whether a tensor of the agent is not finite after the update, [] each.

    A few sequences are evaluated once more: finite weights can be so large that outputs are not.
    """
    tensors = {**network.state_dict(), **optimizer_tensors(network, optimizer)}
    if len(batch):
        few = batch.select(torch.arange(min(CHECKED_SEQUENCES, len(batch))))
        evaluation = _evaluate(network, few, config)
        tensors["log-probs"] = evaluation.log_probs
        tensors["values"] = evaluation.values
    else:  # every process reduces the same names
        tensors["log-probs"] = batch.log_probs
        tensors["values"] = batch.values
    flags = torch.stack([~tensor.isfinite().all() for tensor in tensors.values()]).float()
    return dict(zip(tensors, processes.max_(flags).unbind(), strict=True))


def optimizer_tensors(
    network: RecurrentActorCritic, optimizer: torch.optim.AdamW
) -> dict[str, Tensor]:
    """Return the optimiser's state by the name of the parameter and of the quantity."""
    return {
        f"{name}.{quantity}": tensor
        for name, parameter in network.named_parameters()
        for quantity, tensor in optimizer.state[parameter].items()
    }


@torch.no_grad()
def _locate_nonfinite(
    network: RecurrentActorCritic,
    batch: SequenceBatch,
    minibatches: list[Tensor | None],
    buffer: TamiyoRolloutBuffer,
    progress: UpdateProgress,
    config: PPOConfig,
) -> NonFiniteError:
    """Evaluate the failed minibatch again to name the environment and step in the error.

    No step was taken since, so the weights are still those before it.
    """
    number = int(progress.finite_steps)
    rows = minibatches[number]
    minibatch = batch if rows is None else batch.select(rows)
    is_nonfinite: dict[str, Tensor] = {}
    if len(minibatch):  # a process without sequences has nothing to evaluate
        evaluation = _evaluate_in_parts(network, minibatch, config, 1)
        is_nonfinite = {
            "log_probs": (minibatch.head_mask & ~evaluation.log_probs.isfinite()).any(-1),
            "values": minibatch.valid & ~evaluation.values.isfinite(),
        }
    location = "its gradient, or a step of another process"
    for name, flags in is_nonfinite.items():
        if bool(flags.any()):
            sequence, step = flags.nonzero()[0].tolist()
            if rows is not None:
                sequence = int(rows[sequence])
            length = flags.shape[1]
            parts_per_env = buffer.max_steps_per_env // length
            row, part = divmod(sequence, parts_per_env)
            env = int(buffer.step_counts.nonzero()[row])
            location = f"{name} of environment {env}, step {part * length + step}"
            break
    return NonFiniteError(
        f"The loss of optimiser step {number + 1} of {len(minibatches)} is NaN or infinite",
        given=location,
        fix="the weights are those before that step: lower the learning rate, or look at the "
        "size of rewards and observations",
    )


# --- metrics --------------------------------------------------------------------------------------


def _collect_metrics(
    network: RecurrentActorCritic,
    batch: SequenceBatch,
    counts: Tensor,
    stored_log_prob_error: Tensor,
    progress: UpdateProgress,
    config: PPOConfig,
    processes: Processes,
) -> dict[str, Tensor]:
    """Return the metrics of all processes as tensors: [] each, and `head ...` [H] each."""
    stats = _gather_stats(progress.stats, processes)
    norms = torch.zeros(len(network.action_space) + 2, device=progress.device)
    if progress.gradient_norms:
        norms = torch.stack(progress.gradient_norms).mean(0)

    # Every epoch sees every step once. A head that was never relevant has ratio 1.
    steps = counts.sum(0) // config.epochs  # [2 H + 1]
    begun = counts[: len(progress.stats), :-1].sum(0)  # [2 H], in all steps that were begun
    relevant_steps, entropy_steps = begun.chunk(2)
    divisor = relevant_steps.clamp(min=1)
    ratio_mean = torch.where(relevant_steps > 0, stats.ratio.sum(0) / divisor, 1.0)
    entropy = (stats.entropy.sum(0) / entropy_steps.clamp(min=1)).clamp(max=1.0)  # rounding
    return {
        "policy_loss": stats.policy_loss.sum(1).mean(),
        "value_loss": stats.value_loss.mean(),
        "entropy": entropy.mean(),
        "kl": stats.kl[-1].sum(),
        **_value_statistics(batch, processes),
        "return_scale": network.return_scale,
        "gradient_norm": norms[-1],
        "value_head": norms[-2],
        "stored_log_prob_error": stored_log_prob_error,
        "valid_steps": steps[-1],
        "found_inf": progress.found_inf,
        "head loss": stats.policy_loss.mean(0),
        "head entropy": entropy,
        "head kl": stats.kl[-1],
        "head clip_fraction": stats.clipped.sum(0) / divisor,
        "head relevant_fraction": steps[: len(network.action_space)] / steps[-1],
        "head ratio_min": stats.ratio_min.amin(0),
        "head ratio_mean": ratio_mean,
        "head ratio_max": stats.ratio_max.amax(0),
        "head gradient_norm": norms[:-2],
    }


def _gather_stats(steps: list[LossStats], processes: Processes) -> LossStats:
    """Stack the statistics of all steps, [K] or [K, H], and combine those of all processes."""
    stacked = {
        name: torch.stack([getattr(stats, name) for stats in steps]) for name in vars(steps[0])
    }
    for name, tensor in stacked.items():
        if name == "ratio_min":
            stacked[name] = -processes.max_(-tensor)
        elif name == "ratio_max":
            stacked[name] = processes.max_(tensor)
        else:
            stacked[name] = processes.sum_(tensor)
    return LossStats(**stacked)


def _value_statistics(batch: SequenceBatch, processes: Processes) -> dict[str, Tensor]:
    """Return explained variance, and mean and standard deviation of values and returns."""
    rows = torch.stack((batch.values, batch.returns, batch.returns - batch.values))  # [3, R, T]
    rows = rows.double().masked_fill(~batch.valid, 0.0)
    count = batch.valid.sum().double()
    sums = processes.sum_(torch.cat((rows.sum((1, 2)), count[None])))
    count = sums[3].clamp(min=1)
    mean = sums[:3] / count
    centred = (rows - mean[:, None, None]).masked_fill(~batch.valid, 0.0)
    variance = processes.sum_(centred.square().sum((1, 2))) / count
    unexplained = variance[2] / variance[1].clamp(min=1e-12)
    return {
        "explained_variance": torch.where(variance[1] > 0, 1 - unexplained, 0.0),
        "value_mean": mean[0],
        "value_std": variance[0].sqrt(),
        "return_mean": mean[1],
        "return_std": variance[1].sqrt(),
    }


def _report(
    numbers: Mapping[str, list[float]],
    network: RecurrentActorCritic,
    progress: UpdateProgress,
    config: PPOConfig,
) -> PPOUpdateMetrics:
    """Return the metrics with the keys of `PPOUpdateMetrics`."""
    names, device = network.action_space.names, progress.device
    heads = {
        head: {name: numbers[f"head {name}"][index] for name in HeadUpdateMetrics.__annotations__}
        for index, head in enumerate(names)
    }
    head_norms = dict(zip(names, numbers["head gradient_norm"], strict=True))
    scalars = {name: values[0] for name, values in numbers.items() if len(values) == 1}
    peak_memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    metrics: dict[str, object] = {
        **scalars,
        "gradient_norms": HeadGradientNorms(PerHead(names, head_norms), scalars["value_head"]),
        "valid_steps": int(scalars["valid_steps"]),
        "learning_rate": config.lr,
        "stored_log_prob_tolerance": stored_log_prob_tolerance(config, device),
        "optimizer_steps": len(progress.gradient_norms),
        "stopped_by_kl": progress.stopped_by_kl,
        "peak_memory_bytes": peak_memory,
        "heads": PerHead(names, heads),
    }
    keys = PPOUpdateMetrics.__annotations__
    return cast(PPOUpdateMetrics, {name: metrics[name] for name in keys})
