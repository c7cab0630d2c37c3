"""The PPO loss: relevance of heads, averages, clipping, and a float64 reference.

Shapes: `R` sequences, `T` time, `H` heads, `A` actions of the largest head.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.leyline import CANONICAL_ACTION, ActionSpace, LifecycleOp
from esper.leyline.constants import HEAD_COUNT_FLOOR, LOG_RATIO_CLAMP
from esper.simic.agent import PPOConfig, SequenceBatch
from esper.simic.agent.losses import (
    LossStats,
    LossWeights,
    clipped_surrogate,
    clipped_value_loss,
    ppo_loss,
)
from esper.tamiyo import Evaluation, MaskedCategorical
from tests.simic.batches import (
    canonical_actions,
    evaluate,
    head_advantages,
    make_batch,
    mask_of_sizes,
    random_batch,
    weights_of,
)
from tests.tamiyo.spaces import esper_space

SPACE = esper_space()
NUM_HEADS = len(SPACE)
ONE = torch.ones(())


def loss_of(
    batch: SequenceBatch,
    evaluation: Evaluation,
    config: PPOConfig,
    entropy_coefs: Tensor | None = None,
) -> tuple[Tensor, LossStats]:
    """Return loss and statistics of a minibatch that is this batch."""
    if entropy_coefs is None:
        entropy_coefs = torch.zeros(batch.actions.shape[-1])
    weights = weights_of(batch, config)
    advantages = head_advantages(batch)
    return ppo_loss(batch, evaluation, advantages, weights, entropy_coefs, ONE, config)


# --- float64 reference --------------------------------------------------------------------------


def reference_loss(
    batch: SequenceBatch,
    log_probs: Tensor,
    entropies: Tensor,
    values: Tensor,
    weights: LossWeights,
    entropy_coefs: Tensor,
    return_scale: float,
    config: PPOConfig,
) -> Tensor:
    """Compute the loss by a loop over sequences, steps and heads, in float64.

    Args:
        batch: The batch.
        log_probs: Log-probabilities under the current weights, [R, T, H].
        entropies: Entropies under the current weights, [R, T, H].
        values: Values under the current weights, [R, T].
        weights: Weight of one step in each mean.
        entropy_coefs: Entropy coefficient of each head, [H].
        return_scale: Unit of the value loss.
        config: Settings of the learner.
    """
    num_rows, num_steps, num_heads = log_probs.shape
    low, high = 1 - config.clip_ratio, 1 + config.clip_ratio
    loss = torch.zeros((), dtype=torch.float64)
    for row in range(num_rows):
        for step in range(num_steps):
            if not batch.valid[row, step]:
                continue

            # Clipped value loss.
            value, target = values[row, step], batch.returns[row, step].double()
            old_value = batch.values[row, step].double()
            max_change = config.value_clip * return_scale
            moved_value = old_value + (value - old_value).clamp(-max_change, max_change)
            error = torch.maximum((value - target) ** 2, (moved_value - target) ** 2)
            value_loss = 0.5 * error / return_scale**2
            loss = loss + config.value_coef * value_loss * weights.step.double()

            # Entropy of every head that a legal op made relevant.
            for head in range(num_heads):
                if batch.entropy_mask[row, step, head]:
                    bonus = entropy_coefs[head].double() * entropies[row, step, head]
                    loss = loss - bonus * weights.entropy[head].double()

            # Clipped surrogate of every head that was relevant and had a choice.
            for head in range(num_heads):
                if not batch.head_mask[row, step, head]:
                    continue
                advantage = batch.advantages[row, step].double()
                log_ratio = log_probs[row, step, head] - batch.log_probs[row, step, head].double()
                ratio = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
                surrogate = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
                loss = loss - surrogate * weights.head[head].double()
    return loss


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    rows=st.integers(1, 4),
    time=st.integers(1, 5),
    spread=st.sampled_from([0.0, 0.3, 15.0]),  # 15 exceeds the bound on log-ratios
    head_average=st.sampled_from(["relevant", "all"]),
)
def test_loss_and_gradients_equal_float64_reference(
    seed: int, rows: int, time: int, spread: float, head_average: str
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random_numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    config = PPOConfig(value_clip=0.4, clip_ratio=0.2, value_coef=0.7, head_average=head_average)
    batch, _ = random_batch(SPACE, seed, rows, time)

    # Padding, and steps in which a relevant head had a single legal action.
    valid = torch.rand(rows, time, generator=generator) < 0.8
    has_choice = torch.rand(rows, time, NUM_HEADS, generator=generator) < 0.8
    could_matter = torch.rand(rows, time, NUM_HEADS, generator=generator) < 0.5
    batch = replace(
        batch,
        values=random_numbers(rows, time),
        returns=3 * random_numbers(rows, time),
        valid=valid,
        head_mask=batch.head_mask & valid[..., None] & has_choice,
        entropy_mask=(batch.head_mask | could_matter) & valid[..., None] & has_choice,
    )
    weights = weights_of(batch, config)
    entropy_coefs = torch.rand(NUM_HEADS, generator=generator)
    return_scale = 2.5
    log_probs = batch.log_probs + spread * random_numbers(rows, time, NUM_HEADS)
    leaves = [
        log_probs.requires_grad_(),
        torch.rand(rows, time, NUM_HEADS, generator=generator).requires_grad_(),
        (batch.values + random_numbers(rows, time)).requires_grad_(),
    ]
    loss, stats = ppo_loss(
        batch,
        Evaluation(*leaves),
        head_advantages(batch),
        weights,
        entropy_coefs,
        torch.tensor(return_scale),
        config,
    )
    gradients = torch.autograd.grad(loss, leaves)

    double_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = reference_loss(batch, *double_leaves, weights, entropy_coefs, return_scale, config)
    if not bool(valid.any()):
        assert loss.item() == expected.item() == 0.0
        return
    expected_gradients = torch.autograd.grad(expected, double_leaves, allow_unused=True)
    scale = max(1.0, abs(expected.item()))
    assert loss.item() == pytest.approx(expected.item(), abs=2e-5 * scale)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        if expected_gradient is None:  # the loop never used this leaf
            assert not bool(gradient.any())
        else:
            assert gradient.isfinite().all()
            largest = float(expected_gradient.abs().max())
            atol = 1e-6 + 2e-5 * largest
            torch.testing.assert_close(gradient.double(), expected_gradient, atol=atol, rtol=1e-4)
    assert all(bool(tensor.isfinite().all()) for tensor in vars(stats).values())


def test_gradient_equals_finite_differences() -> None:
    torch.manual_seed(3)
    config = PPOConfig()
    batch, logits = random_batch(SPACE, 3, rows=2, time=3)
    batch = replace(batch, values=torch.randn(2, 3), returns=torch.randn(2, 3))
    weights = weights_of(batch, config)
    entropy_coefs = torch.rand(NUM_HEADS)
    moved_logits = logits + 0.1 * torch.randn_like(logits)

    def loss_at(logits: Tensor) -> Tensor:
        evaluation = evaluate(logits, batch)
        advantages = head_advantages(batch)
        return ppo_loss(batch, evaluation, advantages, weights, entropy_coefs, ONE, config)[0]

    leaf = moved_logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_at(leaf), leaf)
    direction = torch.randn_like(moved_logits)
    step = 1e-2
    after = loss_at(moved_logits + step * direction)
    before = loss_at(moved_logits - step * direction)
    slope = float(after - before) / (2 * step)
    assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-2, abs=1e-4)
    assert abs(slope) > 1e-3


# --- parts of the loss --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.5, 2.0, -2.4), (0.5, 2.0, -1.0), (1.5, -2.0, 3.0), (0.5, -2.0, 1.6), (1.1, 2.0, -2.2)],
)
def test_surrogate_is_clipped_where_the_policy_gained(
    ratio: float, advantage: float, expected: float
) -> None:
    surrogate = clipped_surrogate(torch.tensor(ratio), torch.tensor(advantage), 0.2)
    assert float(surrogate) == pytest.approx(expected)


def test_value_clip_bounds_the_change_of_values() -> None:
    values, old_values, returns = torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([10.0])
    near = clipped_value_loss(values, old_values, returns, value_clip=1.0)
    far = clipped_value_loss(values, old_values, returns, value_clip=5.0)
    assert float(near) == pytest.approx(0.5 * 9.0**2)
    assert float(far) == pytest.approx(0.5 * 7.0**2)


def test_value_loss_does_not_depend_on_policy_clip() -> None:
    batch, logits = random_batch(SPACE, 6)
    batch = replace(batch, returns=torch.full_like(batch.returns, 10.0))
    evaluation = evaluate(logits, batch)._replace(values=torch.full_like(batch.values, 3.0))
    for clip_ratio in (0.1, 0.9):
        config = PPOConfig(value_clip=1.0, clip_ratio=clip_ratio)
        _, stats = loss_of(batch, evaluation, config)
        assert float(stats.value_loss) == pytest.approx(0.5 * 9.0**2)


# --- relevance of heads -------------------------------------------------------------------------


def test_irrelevant_logits_receive_no_gradient() -> None:
    batch, logits = random_batch(SPACE, 0)
    leaf = (logits + 0.3 * torch.randn_like(logits)).requires_grad_()
    config = PPOConfig()
    entropy_coefs = torch.full((NUM_HEADS,), config.entropy_coef)
    loss, _ = loss_of(batch, evaluate(leaf, batch), config, entropy_coefs)
    loss.backward()
    is_relevant = torch.tensor(SPACE.relevance)[batch.actions[..., 0]]
    assert leaf.grad is not None
    assert bool((leaf.grad[~is_relevant] == 0).all())
    assert bool((leaf.grad[~batch.action_masks] == 0).all())
    assert bool((leaf.grad[..., 0, :].abs().sum(-1) > 0).any())


def policy_gradient(
    logits: Tensor,
    space: ActionSpace,
    actions: Tensor,
    masks: Tensor,
    advantages: Tensor,
    head_average: str,
) -> Tensor:
    """Return the gradient of the policy loss at ratio 1 with respect to the logits [H, A]."""
    leaf = logits.clone().requires_grad_()
    batch = make_batch(space, actions, masks, advantages)
    evaluation = evaluate(leaf, batch)
    batch = replace(batch, log_probs=evaluation.log_probs.detach())
    loss, _ = loss_of(batch, evaluation, PPOConfig(head_average=head_average, value_coef=0.0))
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad


def test_average_over_all_steps_keeps_the_expected_gradient() -> None:
    """Every composite action, weighted by its probability: the expectation and not a sample."""
    torch.manual_seed(0)
    space = esper_space(slots=2, blueprints=3)
    always_relevant = replace(space, relevance=((True,) * len(space),) * len(LifecycleOp))
    composites = itertools.product(*(range(size) for size in space.sizes))
    actions = torch.tensor(list(composites))[:, None]  # [R, 1, H]
    logits = torch.randn(len(space), max(space.sizes))
    canonical, resolved_masks = canonical_actions(space, actions)
    open_masks = mask_of_sizes(space).expand(*actions.shape, -1)
    distribution = MaskedCategorical(logits.expand(open_masks.shape), open_masks)
    probability = distribution.log_prob(actions).sum(-1).exp()
    reward_table = torch.randn(space.sizes)
    rewards = reward_table[tuple(canonical.unbind(-1))]  # depends on relevant heads only
    weighted = probability * rewards * len(actions)

    causal = policy_gradient(logits, space, canonical, resolved_masks, weighted, "all")
    unmasked = policy_gradient(logits, always_relevant, actions, open_masks, weighted, "all")
    torch.testing.assert_close(causal, unmasked, atol=1e-5, rtol=1e-4)
    assert float(causal.abs().max()) > 0.01


def test_sampled_gradients_with_and_without_relevance_agree() -> None:
    torch.manual_seed(0)
    num_samples = 300_000
    space = esper_space(slots=2, blueprints=3)
    always_relevant = replace(space, relevance=((True,) * len(space),) * len(LifecycleOp))
    logits = torch.randn(len(space), max(space.sizes))
    open_masks = mask_of_sizes(space).expand(num_samples, 1, -1, -1)
    sampled = MaskedCategorical(logits.expand(open_masks.shape), open_masks).sample()  # [R, 1, H]
    canonical, resolved_masks = canonical_actions(space, sampled)
    assert float((canonical != sampled).float().mean()) > 0.1  # many choices are irrelevant
    rewards = torch.randn(space.sizes)[tuple(canonical.unbind(-1))]
    rewards = rewards + torch.randn(rewards.shape)

    causal = policy_gradient(logits, space, canonical, resolved_masks, rewards, "all")
    unmasked = policy_gradient(logits, always_relevant, sampled, open_masks, rewards, "all")
    noise = float(3 * (rewards.square().mean() / num_samples).sqrt())  # three standard errors
    assert float((causal - unmasked).abs().max()) < noise
    assert float(causal.abs().max()) > 10 * noise
    # The average over the relevant steps gives rare heads a larger gradient.
    relevant = policy_gradient(logits, space, canonical, resolved_masks, rewards, "relevant")
    assert float((relevant - unmasked).abs().max()) > 2 * noise


def test_head_that_was_never_relevant_contributes_zero() -> None:
    batch, logits = random_batch(SPACE, 1)
    waiting, masks = canonical_actions(SPACE, torch.zeros_like(batch.actions))
    batch = make_batch(SPACE, waiting, masks, batch.advantages, batch.log_probs)
    leaf = logits.requires_grad_()
    _, stats = loss_of(batch, evaluate(leaf, batch), PPOConfig())
    for statistic in (stats.policy_loss, stats.entropy, stats.kl, stats.clipped, stats.ratio):
        assert bool((statistic[1:] == 0).all())
        assert bool(statistic.isfinite().all())
    evaluation = evaluate(leaf, batch)
    advantages = head_advantages(batch)
    weights = weights_of(batch, PPOConfig())
    no_op_head = torch.arange(NUM_HEADS) > 0
    irrelevant = batch.head_mask & no_op_head
    loss, _ = ppo_loss(
        replace(batch, head_mask=irrelevant, entropy_mask=irrelevant),
        evaluation,
        advantages * no_op_head,
        weights,
        torch.ones(NUM_HEADS),
        ONE,
        PPOConfig(),
    )
    loss.backward()
    assert leaf.grad is not None
    assert bool((leaf.grad == 0).all())


def test_kl_is_exactly_zero_for_heads_never_relevant() -> None:
    """The stored log-probabilities of such heads differ, and must not reach the KL estimate."""
    batch, logits = random_batch(SPACE, 1)
    waiting, masks = canonical_actions(SPACE, torch.zeros_like(batch.actions))
    batch = make_batch(SPACE, waiting, masks, batch.advantages)
    evaluation = evaluate(logits, batch)
    log_probs = evaluation.log_probs.clone()
    log_probs[..., 1:] -= 3.0
    batch = replace(batch, log_probs=log_probs)
    _, stats = loss_of(batch, evaluation, PPOConfig())
    assert stats.kl.tolist() == [0.0] * NUM_HEADS
    no_valid_steps = replace(
        batch,
        valid=torch.zeros_like(batch.valid),
        head_mask=torch.zeros_like(batch.head_mask),
    )
    _, stats = loss_of(no_valid_steps, evaluation, PPOConfig())
    assert float(stats.kl.sum()) == 0.0


def test_step_with_single_legal_action_has_no_weight() -> None:
    batch, logits = random_batch(SPACE, 3)
    masks, actions = batch.action_masks.clone(), batch.actions.clone()
    masks[0] = torch.arange(masks.shape[-1]) == CANONICAL_ACTION
    actions[0] = CANONICAL_ACTION
    batch = make_batch(SPACE, actions, masks, batch.advantages, batch.log_probs)
    assert not bool(batch.head_mask[0].any())
    advantages = batch.advantages.clone()
    advantages[0] = 1e6
    evaluation = evaluate(logits, batch)
    _, stats = loss_of(batch, evaluation, PPOConfig())
    _, large_stats = loss_of(replace(batch, advantages=advantages), evaluation, PPOConfig())
    assert torch.equal(stats.policy_loss, large_stats.policy_loss)


# --- averages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("head_average", ["relevant", "all"])
def test_policy_loss_is_averaged_over_the_configured_steps(head_average: str) -> None:
    batch, logits = random_batch(SPACE, 2)
    _, stats = loss_of(batch, evaluate(logits, batch), PPOConfig(head_average=head_average))
    is_relevant = torch.tensor(SPACE.relevance)[batch.actions[..., 0]]
    for head in range(NUM_HEADS):
        advantages = batch.advantages[is_relevant[..., head]]
        count = len(advantages) if head_average == "relevant" else batch.valid.numel()
        torch.testing.assert_close(stats.policy_loss[head], -advantages.sum() / count)


def test_single_relevant_step_does_not_get_full_weight() -> None:
    rows, time = 10, 20
    actions = torch.zeros(rows, time, NUM_HEADS, dtype=torch.int64)
    actions[0, 0, 0] = LifecycleOp.GERMINATE
    actions, masks = canonical_actions(SPACE, actions)
    batch = make_batch(SPACE, actions, masks, torch.ones(rows, time))
    weights = weights_of(batch, PPOConfig())
    blueprint = SPACE.index("blueprint")
    assert float(weights.head[blueprint]) == pytest.approx(1 / (HEAD_COUNT_FLOOR * rows * time))
    assert float(weights.head[0]) == pytest.approx(1 / (rows * time))


def test_statistics_of_parts_sum_to_those_of_whole() -> None:
    batch, logits = random_batch(SPACE, 4)
    config = PPOConfig()
    moved_logits = logits + 0.3 * torch.randn_like(logits)
    weights = weights_of(batch, config)
    coefs = torch.zeros(NUM_HEADS)
    loss, stats = ppo_loss(
        batch, evaluate(moved_logits, batch), head_advantages(batch), weights, coefs, ONE, config
    )
    total = LossStats.zeros(NUM_HEADS, torch.device("cpu"))
    losses = []
    for rows in torch.arange(len(batch)).split(2):
        part = batch.select(rows)
        evaluation = evaluate(moved_logits[rows], part)
        part_loss, part_stats = ppo_loss(
            part, evaluation, head_advantages(part), weights, coefs, ONE, config
        )
        total = total + part_stats
        losses.append(part_loss)
    torch.testing.assert_close(sum(losses), loss)
    for name, statistic in vars(stats).items():
        torch.testing.assert_close(getattr(total, name), statistic, msg=name)


def test_ratio_extremes_are_not_limited_by_one() -> None:
    """Statistics of no steps are the neutral element of addition."""
    batch, logits = random_batch(SPACE, 5)
    evaluation = evaluate(logits, batch)
    raised = replace(batch, log_probs=evaluation.log_probs - 0.1)
    op_only = replace(raised, head_mask=torch.ones_like(batch.head_mask))
    _, stats = loss_of(op_only, evaluation, PPOConfig())
    total = LossStats.zeros(NUM_HEADS, torch.device("cpu")) + stats
    expected = torch.full((NUM_HEADS,), math.exp(0.1))
    torch.testing.assert_close(total.ratio_min, expected)
    torch.testing.assert_close(total.ratio_max, expected)


def test_kl_is_summed_over_heads_and_averaged_over_steps() -> None:
    batch, logits = random_batch(SPACE, 5)
    evaluation = evaluate(logits + 0.3 * torch.randn_like(logits), batch)
    _, stats = loss_of(batch, evaluation, PPOConfig())
    log_ratio = evaluation.log_probs - batch.log_probs
    k3 = log_ratio.exp() - 1 - log_ratio
    torch.testing.assert_close(stats.kl.sum(), k3.sum(-1).mean())
    assert float(stats.kl.sum()) > 0


# --- selecting sequences ------------------------------------------------------------------------


def test_selecting_one_sequence_equals_selecting_several() -> None:
    batch, _ = random_batch(SPACE, 8)
    hidden = torch.randn(2, 1, 6, 2)
    batch = replace(batch, initial_hidden_h=hidden[0], initial_hidden_c=hidden[1])
    for row in range(6):
        single = batch.select(torch.tensor([row]))
        twice = batch.select(torch.tensor([row, row]))
        assert len(single) == 1
        assert len(twice) == 2
        for name, tensor in vars(twice).items():
            if tensor is None:  # this batch has no separate entropy masks
                continue
            dim = 1 if name.startswith("initial_hidden") else 0
            assert torch.equal(getattr(single, name), tensor.narrow(dim, 0, 1)), name
