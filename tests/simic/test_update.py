"""An update's losses: credit where it is due, averages over the right steps, entropy targets."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper.leyline import (
    CANONICAL_ACTION,
    DEFAULT_ENTROPY_COEF,
    ActionSpace,
    LifecycleOp,
)
from esper.leyline.constants import HEAD_COUNT_FLOOR, LOG_RATIO_CLAMP
from esper.simic.agent import PPOConfig, SequenceBatch
from esper.simic.agent.advantages import mattered
from esper.simic.agent.update import (
    Terms,
    entropy_coefficients,
    ppo_terms,
    shares,
    step_counts,
    total_loss,
)
from esper.tamiyo import Evaluation, MaskedCategorical, independent_heads
from tests.tamiyo.spaces import esper_space

SPACE = esper_space()
ONE = torch.ones(())


def make_batch(
    actions: Tensor,
    masks: Tensor,
    advantages: Tensor,
    old: Tensor,
    space: ActionSpace = SPACE,
) -> SequenceBatch:
    shape = advantages.shape
    every = torch.ones(shape, dtype=torch.bool)
    nothing = torch.zeros(shape)
    memory = torch.zeros(1, len(advantages), 2)
    return SequenceBatch(
        states=nothing[..., None],
        actions=actions,
        masks=masks,
        log_probs=old,
        values=nothing,
        advantages=advantages,
        returns=nothing,
        valid=every,
        matters=mattered(space, actions, masks, every),
        starts=torch.zeros(shape, dtype=torch.bool),
        hidden=(memory, memory),
    )


def evaluate(logits: Tensor, batch: SequenceBatch) -> Evaluation:
    chosen = MaskedCategorical(logits.expand(batch.masks.shape), batch.masks)
    return Evaluation(chosen.log_prob(batch.actions), chosen.entropy(), batch.values)


def terms_of(batch: SequenceBatch, found: Evaluation, config: PPOConfig) -> Terms:
    share = shares(step_counts(batch).sum(0), config)
    return ppo_terms(batch, found, share, ONE, config)


def sizes_mask(space: ActionSpace) -> Tensor:
    return torch.arange(max(space.sizes)) < torch.tensor(space.sizes)[:, None]


def canonical(space: ActionSpace, actions: Tensor) -> tuple[Tensor, Tensor]:
    """The actions and masks that acting would have stored for these choices."""
    relevant = torch.tensor(space.relevance)[actions[..., 0]]
    only = torch.arange(max(space.sizes)) == CANONICAL_ACTION
    masks = torch.where(relevant[..., None], sizes_mask(space), only)
    return torch.where(relevant, actions, CANONICAL_ACTION), masks


def random_batch(seed: int, rows: int = 6, time: int = 8) -> tuple[SequenceBatch, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    sampled = [torch.randint(size, (rows, time), generator=draw) for size in SPACE.sizes]
    actions, masks = canonical(SPACE, torch.stack(sampled, -1))
    logits = torch.randn(rows, time, len(SPACE), max(SPACE.sizes), generator=draw)
    old = MaskedCategorical(logits, masks).log_prob(actions)
    advantages = torch.randn(rows, time, generator=draw)
    return make_batch(actions, masks, advantages, old), logits


def test_logits_that_did_not_matter_receive_exactly_no_gradient() -> None:
    batch, logits = random_batch(0)
    leaf = (logits + 0.3 * torch.randn_like(logits)).requires_grad_()
    config = PPOConfig()
    terms = terms_of(batch, evaluate(leaf, batch), config)
    total_loss(terms, torch.full((len(SPACE),), config.entropy_coef), config).backward()
    relevant = torch.tensor(SPACE.relevance)[batch.actions[..., 0]]
    assert leaf.grad is not None
    assert bool((leaf.grad[~relevant] == 0).all())
    assert bool((leaf.grad[~batch.masks] == 0).all())
    assert bool((leaf.grad[..., 0, :].abs().sum(-1) > 0).any())


def test_averaged_over_all_steps_the_expected_gradient_is_the_unmasked_one() -> None:
    # Every composite action, weighted by its probability: the expectation itself, not a sample.
    torch.manual_seed(0)
    space = esper_space(slots=2, blueprints=3)
    free = replace(space, relevance=((True,) * len(space),) * len(LifecycleOp))
    every = torch.tensor(list(itertools.product(*map(range, space.sizes))))[:, None]  # [R, 1, H]
    logits = torch.randn(len(space), max(space.sizes), dtype=torch.float64).float()
    stored, masks = canonical(space, every)
    whole = sizes_mask(space).expand(*every.shape, -1)
    probability = MaskedCategorical(logits.expand(whole.shape), whole).log_prob(every).sum(-1).exp()
    reward_of = torch.randn(space.sizes)
    reward = reward_of[tuple(stored.unbind(-1))]  # depends on what mattered only
    config = PPOConfig(head_average="all")

    def gradient(space: ActionSpace, actions: Tensor, masks: Tensor) -> Tensor:
        leaf = logits.clone().requires_grad_()
        batch = make_batch(actions, masks, probability * reward * len(every), torch.empty(0), space)
        found = evaluate(leaf, batch)
        batch = replace(batch, log_probs=found.log_probs.detach())
        terms_of(batch, found, config).policy.sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    causal, unmasked = gradient(space, stored, masks), gradient(free, every, whole)
    torch.testing.assert_close(causal, unmasked, atol=1e-5, rtol=1e-4)
    assert float(causal.abs().max()) > 0.01


@pytest.mark.slow
def test_sampling_actions_that_do_not_matter_gives_the_same_gradient_on_average() -> None:
    torch.manual_seed(0)
    samples = 300_000
    space = esper_space(slots=2, blueprints=3)
    free = replace(space, relevance=((True,) * len(space),) * len(LifecycleOp))
    logits = torch.randn(len(space), max(space.sizes))
    whole = sizes_mask(space).expand(samples, 1, -1, -1)
    drawn = MaskedCategorical(logits.expand(whole.shape), whole).sample()  # [R, 1, H], all of them
    stored, masks = canonical(space, drawn)
    assert float((stored != drawn).float().mean()) > 0.1  # many did not matter
    reward = torch.randn(space.sizes)[tuple(stored.unbind(-1))]
    reward = reward + torch.randn(reward.shape)

    def gradient(space: ActionSpace, actions: Tensor, masks: Tensor, average: str) -> Tensor:
        leaf = logits.clone().requires_grad_()
        batch = make_batch(actions, masks, reward, torch.empty(0), space)
        found = evaluate(leaf, batch)
        batch = replace(batch, log_probs=found.log_probs.detach())
        terms_of(batch, found, PPOConfig(head_average=average)).policy.sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    causal = gradient(space, stored, masks, "all")
    unmasked = gradient(free, drawn, whole, "all")
    noise = 3 * (reward.square().mean() / samples).sqrt()  # standard errors, at the most
    assert float((causal - unmasked).abs().max()) < float(noise)
    assert float(causal.abs().max()) > 10 * float(noise)
    # Averaged over the steps where it mattered, a rare head's gradient is another, larger one.
    relevant = gradient(space, stored, masks, "relevant")
    assert float((relevant - unmasked).abs().max()) > 2 * float(noise)


def test_a_head_that_never_mattered_contributes_exactly_zero() -> None:
    batch, logits = random_batch(1)
    waiting, masks = canonical(SPACE, torch.zeros_like(batch.actions))
    batch = make_batch(waiting, masks, batch.advantages, batch.log_probs)
    leaf = logits.requires_grad_()
    terms = terms_of(batch, evaluate(leaf, batch), PPOConfig())
    for part in (terms.policy, terms.entropy, terms.kl, terms.clipped):
        assert bool((part[1:] == 0).all())
        assert bool(part.isfinite().all())
    terms.policy[1:].sum().backward()
    assert leaf.grad is not None
    assert bool((leaf.grad == 0).all())


@pytest.mark.parametrize("average", ["relevant", "all"])
def test_a_heads_loss_is_averaged_over_the_configured_steps(average: str) -> None:
    batch, logits = random_batch(2)
    config = PPOConfig(head_average=average)
    terms = terms_of(batch, evaluate(logits, batch), config)
    relevant = torch.tensor(SPACE.relevance)[batch.actions[..., 0]]
    for head in range(len(SPACE)):
        kept = batch.advantages[relevant[..., head]]
        count = len(kept) if average == "relevant" else batch.valid.numel()
        torch.testing.assert_close(terms.policy[head], -kept.sum() / count)


def test_a_lone_step_does_not_get_full_weight() -> None:
    rows, time = 10, 20
    actions = torch.zeros(rows, time, len(SPACE), dtype=torch.int64)
    actions[0, 0, 0] = LifecycleOp.GERMINATE
    actions, masks = canonical(SPACE, actions)
    zeros = torch.zeros(rows, time, len(SPACE))
    batch = make_batch(actions, masks, torch.ones(rows, time), zeros)
    share = shares(step_counts(batch).sum(0), PPOConfig())
    blueprint = SPACE.index("blueprint")
    assert float(share.head[blueprint]) == pytest.approx(1 / (HEAD_COUNT_FLOOR * rows * time))
    assert float(share.head[0]) == pytest.approx(1 / (rows * time))


def test_steps_with_only_one_legal_composite_action_have_no_weight() -> None:
    batch, logits = random_batch(3)
    only = torch.zeros_like(batch.masks[0])
    only[..., CANONICAL_ACTION] = True
    forced = batch.masks.clone()
    forced[0] = only
    actions = batch.actions.clone()
    actions[0] = CANONICAL_ACTION
    batch = make_batch(actions, forced, batch.advantages, batch.log_probs)
    assert not bool(batch.matters[0].any())
    louder = replace(batch, advantages=batch.advantages.clone())
    louder.advantages[0] = 1e6
    config = PPOConfig()
    found = evaluate(logits, batch)
    quiet, loud = (terms_of(b, found, config).policy for b in (batch, louder))
    assert torch.equal(quiet, loud)


def test_parts_add_up_to_the_whole() -> None:
    batch, logits = random_batch(4)
    config = PPOConfig()
    moved = logits + 0.3 * torch.randn_like(logits)
    share = shares(step_counts(batch).sum(0), config)
    whole = ppo_terms(batch, evaluate(moved, batch), share, ONE, config)
    parts = []
    for rows in torch.arange(len(batch.valid)).split(2):
        part = batch.rows(rows)
        parts.append(ppo_terms(part, evaluate(moved[rows], part), share, ONE, config))
    summed = parts[0].plus(parts[1]).plus(parts[2])
    torch.testing.assert_close(tuple(summed), tuple(whole))


def test_the_divergence_is_the_sum_over_heads_of_the_mean_over_steps() -> None:
    batch, logits = random_batch(5)
    moved = logits + 0.3 * torch.randn_like(logits)
    found = evaluate(moved, batch)
    terms = terms_of(batch, found, PPOConfig())
    log_ratio = found.log_probs - batch.log_probs
    k3 = log_ratio.exp() - 1 - log_ratio
    torch.testing.assert_close(terms.kl.sum(), k3.sum(-1).mean())
    assert float(terms.kl.sum()) > 0


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_the_entropy_coefficient_means_the_same_whatever_the_number_of_heads(heads: int) -> None:
    space = independent_heads((3,) * heads)
    entropies = torch.full((2, 2, heads), 0.5)
    matters = torch.ones(2, 2, heads, dtype=torch.bool)
    coefs = entropy_coefficients(entropies, matters, space, PPOConfig())
    assert float(coefs.sum()) == pytest.approx(DEFAULT_ENTROPY_COEF)


def test_a_head_at_its_entropy_target_gets_no_bonus() -> None:
    entropies = torch.full((2, 2, len(SPACE)), 0.5)
    matters = torch.ones(2, 2, len(SPACE), dtype=torch.bool)
    targets = {"op": 0.4, "slot": 0.6}
    coefs = entropy_coefficients(entropies, matters, SPACE, PPOConfig(entropy_targets=targets))
    assert float(coefs[0]) == 0
    assert bool((coefs[1:] == coefs[1]).all())
    assert float(coefs[1]) > 0


def test_the_value_clip_is_apart_from_the_policys() -> None:
    batch, logits = random_batch(6)
    batch = replace(batch, returns=torch.full_like(batch.returns, 10.0))
    found = evaluate(logits, batch)._replace(values=torch.full_like(batch.values, 3.0))
    near, far = PPOConfig(value_clip=1.0), PPOConfig(value_clip=5.0)
    assert float(terms_of(batch, found, near).value) == pytest.approx(0.5 * 9.0**2)
    assert float(terms_of(batch, found, far).value) == pytest.approx(0.5 * 7.0**2)
    wider = replace(near, clip_ratio=0.9)
    assert float(terms_of(batch, found, wider).value) == pytest.approx(0.5 * 9.0**2)


def test_losses_and_their_gradients_are_those_of_the_plain_formulas() -> None:
    torch.manual_seed(7)
    config = PPOConfig(value_clip=0.4, clip_ratio=0.2)
    for spread in (0.3, 15.0):  # the second leaves the bounds of the logarithm too
        batch, _ = random_batch(6)
        valid = torch.rand(batch.valid.shape) < 0.9
        values, returns = torch.randn(2, *valid.shape)
        batch = replace(batch, values=values, returns=3 * returns, valid=valid)
        batch = replace(batch, matters=batch.matters & valid[..., None])
        share = shares(step_counts(batch).sum(0), config)
        scale, coefs = torch.tensor(2.5), torch.rand(len(SPACE))
        leaves = [
            (batch.log_probs + spread * torch.randn_like(batch.log_probs)).requires_grad_(),
            torch.rand_like(batch.log_probs).requires_grad_(),
            (values + torch.randn_like(values)).requires_grad_(),
        ]
        found = ppo_terms(batch, Evaluation(*leaves), share, scale, config)
        gradients = torch.autograd.grad(total_loss(found, coefs, config), leaves)

        log_probs, entropies, guessed = (leaf.double() for leaf in leaves)
        counted = batch.matters * share.head.double()
        ratio = (log_probs - batch.log_probs).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
        advantages = batch.advantages[..., None].double()
        worst = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        policy, bonus = -(worst * counted).sum((0, 1)), (entropies * counted).sum((0, 1))
        near = values + (guessed - values).clamp(-0.4 * 2.5, 0.4 * 2.5)
        errors = torch.maximum((guessed - batch.returns) ** 2, (near - batch.returns) ** 2)
        value = 0.5 * (errors / 2.5**2 * valid).sum() * share.step
        loss = policy.sum() + config.value_coef * value - (coefs * bonus).sum()
        expected = torch.autograd.grad(loss, leaves)
        named = (found.policy, found.bonus, found.value[0])
        for one, other in zip((*named, *gradients), (policy, bonus, value, *expected), strict=True):
            torch.testing.assert_close(one.double(), other.double(), atol=1e-6, rtol=1e-4)
        assert all(bool((gradient == 0).any()) for gradient in gradients), "nothing was clipped"


def test_one_sequence_is_taken_as_several_are() -> None:
    batch, _ = random_batch(8)
    batch = replace(batch, hidden=(torch.randn(1, 6, 2), torch.randn(1, 6, 2)))
    for row in range(6):
        single, twice = batch.rows(torch.tensor([row])), batch.rows(torch.tensor([row, row]))
        for name, part in vars(twice).items():
            if name == "hidden":
                for one, both in zip(single.hidden, part, strict=True):
                    assert torch.equal(one, both[:, :1])
            else:
                assert torch.equal(getattr(single, name), part[:1])
