"""The network: heads, agreement of acting and evaluating, initial weights, errors.

Shapes: `N` rows, `T` time, `H` heads, `A` actions of the largest head.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from esper.leyline import (
    CANONICAL_ACTION,
    DEFAULT_LSTM_HIDDEN_DIM,
    ActionError,
    Actions,
    ActionSpace,
    AgreementError,
    Legality,
    LifecycleOp,
)
from esper.tamiyo import (
    Controller,
    FactoredRecurrentActorCritic,
    InvalidStateMachineError,
    LearnedController,
    MaskedCategorical,
    SkipActorCritic,
    independent_heads,
    stack_logits,
    unwrap_network,
)
from tests.tamiyo.spaces import esper_space, random_legality
from tests.tamiyo.test_sequences import run_step_by_step

STATE_DIM = 6
HIDDEN_DIM = DEFAULT_LSTM_HIDDEN_DIM // 8


def make_network(
    space: ActionSpace, layers: int = 1, kind: type = FactoredRecurrentActorCritic
) -> Any:
    """Return a network whose initial policy is far from uniform."""
    torch.manual_seed(0)
    network = kind(space, state_dim=STATE_DIM, lstm_hidden_dim=HIDDEN_DIM, lstm_layers=layers)
    for head in network.heads.values():
        nn.init.normal_(head[-1].weight, std=0.5)
    return network


# --- acting and evaluating ----------------------------------------------------------------------


@pytest.mark.parametrize("space", [esper_space(), esper_space(16), independent_heads((4, 2, 9))])
@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        (FactoredRecurrentActorCritic, 1),
        (FactoredRecurrentActorCritic, 2),
        (SkipActorCritic, 1),
        (SkipActorCritic, 0),
    ],
)
def test_acting_and_evaluating_agree_across_resets(
    space: ActionSpace, kind: type, layers: int
) -> None:
    rows, time = 5, 14
    network, generator = make_network(space, layers, kind), torch.Generator().manual_seed(1)
    states = torch.randn(rows, time, STATE_DIM, generator=generator)
    starts = torch.rand(rows, time, generator=generator) < 0.3
    initial_hidden = hidden = network.get_initial_hidden(rows)
    steps = []
    for step in range(time):
        legality = random_legality(space, rows, generator)
        sampled, values, hidden = network.get_action(
            states[:, step], legality, hidden, starts[:, step], generator=generator
        )
        assert bool(legality.permits(Actions(space, sampled.actions)).all())
        steps.append((*sampled[:3], values))
    actions, masks, log_probs, values = (
        torch.stack(tensors, 1) for tensors in zip(*steps, strict=True)
    )
    evaluation = network.evaluate_actions(states, actions, masks, initial_hidden, starts)
    torch.testing.assert_close(evaluation.log_probs, log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(evaluation.values, values, atol=1e-5, rtol=0)
    assert evaluation.log_probs.requires_grad
    assert not log_probs.requires_grad


def test_get_action_documents_that_it_has_no_gradient() -> None:
    assert "without gradient" in (FactoredRecurrentActorCritic.get_action.__doc__ or "")


def test_irrelevant_head_is_canonical_and_has_no_gradient() -> None:
    space, rows = esper_space(), 64
    network, generator = make_network(space), torch.Generator().manual_seed(2)
    states = torch.randn(rows, STATE_DIM, generator=generator)
    legality = random_legality(space, rows, generator)
    sampled, _, _ = network.get_action(states, legality, generator=generator)
    is_relevant = torch.tensor(space.relevance)[sampled.actions[:, 0]]
    assert bool((sampled.actions[~is_relevant] == CANONICAL_ACTION).all())
    assert bool((sampled.log_probs[~is_relevant] == 0).all())
    is_waiting = sampled.actions[:, 0] == LifecycleOp.WAIT
    assert bool(is_waiting.any())
    assert not bool(is_waiting.all())

    logits = stack_logits(network(states).logits, space, sampled.actions)
    leaf = logits.detach().requires_grad_()
    distribution = MaskedCategorical(leaf, sampled.masks)
    weight = torch.randn(rows, len(space), generator=generator)
    log_prob, entropy = distribution.log_prob(sampled.actions), distribution.entropy()
    (weight * (log_prob + entropy)).sum().backward()
    assert leaf.grad is not None
    assert bool((leaf.grad[~is_relevant] == 0).all())
    assert bool((leaf.grad[~sampled.masks] == 0).all())
    assert bool((leaf.grad[:, 0] != 0).any())


def test_later_heads_are_masked_by_earlier_choices() -> None:
    space, rows = esper_space(), 500
    legality = random_legality(space, rows, torch.Generator().manual_seed(3))
    network = make_network(space)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        states = torch.randn(rows, STATE_DIM)
        sampled, _, _ = network.get_action(states, legality, generator=generator)
        assert bool(legality.permits(Actions(space, sampled.actions)).all())


def test_head_without_legal_action_is_named() -> None:
    space = esper_space()
    op_mask = torch.ones(3, space.size("op"), dtype=torch.bool)
    op_mask[1] = False
    network = make_network(space)
    with pytest.raises(InvalidStateMachineError, match=r"'op'.*row \[1\]"):
        network.get_action(torch.randn(3, STATE_DIM), Legality(space, 3, {"op": op_mask}))


def test_learned_controller_keeps_its_hidden_state_within_episodes() -> None:
    network = make_network(independent_heads((5,)))
    controller = LearnedController(network)
    assert isinstance(controller, Controller)
    legality = Legality(network.action_space, 2, {})
    states = torch.randn(4, 2, STATE_DIM)
    starts = torch.tensor([[1, 1], [0, 0], [0, 1], [0, 0]], dtype=torch.bool)
    for step in range(4):
        controller.act(states[step], legality, starts[step])
    assert controller._hidden is not None
    features = network.feature_net(states.transpose(0, 1))
    _, expected = run_step_by_step(network.lstm, features, network.get_initial_hidden(2), starts.T)
    torch.testing.assert_close(controller._hidden[0], expected[0], atol=1e-6, rtol=0)


# --- structure ----------------------------------------------------------------------------------


def test_heads_are_named_by_the_action_space() -> None:
    space = esper_space(5)
    network = make_network(space)
    assert tuple(network.heads) == space.names
    output = network(torch.randn(3, STATE_DIM))
    assert {name: logits.shape[-1] for name, logits in output.logits.items()} == dict(
        zip(space.names, space.sizes, strict=True)
    )
    assert output.values.shape == (3,)


def test_feature_dim_is_the_width_of_the_feature_net() -> None:
    network = FactoredRecurrentActorCritic(
        esper_space(), state_dim=STATE_DIM, feature_dim=24, lstm_hidden_dim=HIDDEN_DIM
    )
    assert network.feature_net[0].out_features == network.lstm.input_size == 24
    assert network(torch.randn(3, STATE_DIM)).hidden[0].shape == (1, 3, HIDDEN_DIM)


def test_masked_features_do_not_reach_the_network() -> None:
    network = make_network(esper_space())
    network.feature_mask[2] = 0.0
    states = torch.randn(3, STATE_DIM)
    changed = states.clone()
    changed[:, 2] += 5.0
    assert torch.equal(network(states).values, network(changed).values)
    changed[:, 1] += 5.0
    assert not torch.equal(network(states).values, network(changed).values)


def test_initial_weights_are_the_documented_ones() -> None:
    network = FactoredRecurrentActorCritic(esper_space(), state_dim=STATE_DIM)
    assert network.lstm_hidden_dim == DEFAULT_LSTM_HIDDEN_DIM
    bias = network.lstm.bias_ih_l0 + network.lstm.bias_hh_l0
    forget_gate_bias = bias.chunk(4)[1]
    assert bool((forget_gate_bias == 1).all())
    assert torch.equal(bias.sum(), forget_gate_bias.sum())
    for head, size in zip(network.heads.values(), network.action_space.sizes, strict=True):
        hidden_weight, output_weight = head[0].weight, head[-1].weight
        assert hidden_weight.shape == (DEFAULT_LSTM_HIDDEN_DIM // 2, DEFAULT_LSTM_HIDDEN_DIM)
        output_product = output_weight @ output_weight.T
        torch.testing.assert_close(output_product, 0.01**2 * torch.eye(size), atol=1e-7, rtol=0)
        hidden_product = hidden_weight @ hidden_weight.T
        expected = 2 * torch.eye(len(hidden_weight))
        torch.testing.assert_close(hidden_product, expected, atol=1e-4, rtol=0)
    assert network.value_head[-1].weight.norm().item() == pytest.approx(1.0, abs=1e-5)


def test_bias_action_logit_changes_one_logit() -> None:
    network = make_network(esper_space())
    states = torch.randn(3, STATE_DIM)
    before = network(states).logits
    network.bias_action_logit("op", LifecycleOp.PRUNE, -2.0)
    after = network(states).logits
    expected = torch.zeros_like(before["op"])
    expected[:, LifecycleOp.PRUNE] = -2.0
    torch.testing.assert_close(after["op"] - before["op"], expected)
    assert torch.equal(after["slot"], before["slot"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_initial_hidden_state_has_device_and_dtype(dtype: torch.dtype) -> None:
    network = make_network(esper_space()).to(dtype)
    states = torch.randn(3, STATE_DIM, dtype=dtype)
    assert network.get_initial_hidden(3)[0].dtype == dtype
    h, c = network.get_initial_hidden(3, "meta", torch.float16)
    assert c.device.type == "meta"
    assert h.dtype == c.dtype == torch.float16
    output = network(states)
    assert output.hidden[0].dtype == output.hidden[1].dtype == dtype
    assert output.values.dtype == torch.float32


@pytest.mark.parametrize("kind", [FactoredRecurrentActorCritic, SkipActorCritic])
def test_autocast_keeps_log_probs_in_float32(kind: type) -> None:
    space = esper_space()
    network = make_network(space, kind=kind)
    generator = torch.Generator().manual_seed(0)
    states, legality = torch.randn(3, STATE_DIM), random_legality(space, 3, generator)
    with torch.autocast("cpu", torch.bfloat16):
        sampled, values, _ = network.get_action(states, legality, generator=generator)
        evaluation = network.evaluate_actions(states, sampled.actions, sampled.masks)
    for tensor in (sampled.log_probs, values, *evaluation):
        assert tensor.dtype == torch.float32
    torch.testing.assert_close(evaluation.log_probs, sampled.log_probs, atol=1e-2, rtol=0)


def test_copy_does_not_share_weights_or_statistics() -> None:
    network = make_network(esper_space())
    states = torch.randn(3, STATE_DIM)
    copied = copy.deepcopy(network)
    assert torch.equal(copied(states).values, network(states).values)
    before = network(states).values
    copied.observation_norm.observe(5 + torch.randn(20, STATE_DIM))
    copied.bias_action_logit("op", 0, 1.0)
    nn.init.ones_(copied.value_head[-1].weight)
    assert torch.equal(network(states).values, before)
    assert not torch.equal(copied(states).values, before)


# --- errors -------------------------------------------------------------------------------------

WRONG_CALLS: list[tuple[Callable[[Any, Legality], object], str]] = [
    (lambda net, legal: net(torch.zeros(3, STATE_DIM + 1)), rf"valid: \[rows, {STATE_DIM}\]"),
    (lambda net, legal: net(torch.zeros(STATE_DIM)), "wrong shape"),
    (
        lambda net, legal: net.get_action(torch.zeros(2, STATE_DIM), legal),
        rf"valid: \[3, {STATE_DIM}\]",
    ),
    (
        lambda net, legal: net.get_action(torch.zeros(3, 1, STATE_DIM), legal),
        rf"valid: \[3, {STATE_DIM}\]",
    ),
    (
        lambda net, legal: net.evaluate_actions(
            torch.zeros(3, 2, STATE_DIM), torch.zeros(3, 2, 1), torch.zeros(3, 2, 4)
        ),
        r"Actions .* valid: \[3, 2, 4\]",
    ),
    (
        lambda net, legal: net.evaluate_actions(
            torch.zeros(3, 2, STATE_DIM), torch.zeros(3, 2, 4), torch.zeros(3, 2, 4)
        ),
        r"Masks .* valid: \[3, 2, 4, 5\]",
    ),
    (
        lambda net, legal: net(
            torch.zeros(3, 2, STATE_DIM), None, torch.zeros(3, dtype=torch.bool)
        ),
        r"valid: torch.bool \[3, 2\]",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG_CALLS)
def test_wrong_shapes_raise_with_the_expected_one(
    call: Callable[[Any, Legality], object], message: str
) -> None:
    network = make_network(esper_space())
    with pytest.raises(AgreementError, match=message):
        call(network, Legality(network.action_space, 3, {}))


def test_impossible_sizes_and_other_modules_raise() -> None:
    with pytest.raises(AgreementError, match="too small"):
        FactoredRecurrentActorCritic(esper_space(), state_dim=0)
    with pytest.raises(AgreementError, match="layers from 1"):
        make_network(independent_heads((3,)), layers=0)
    with pytest.raises(AgreementError, match="given: Linear"):
        unwrap_network(nn.Linear(1, 1))
    with pytest.raises(ActionError, match="wrong shape"):
        Legality(independent_heads((2,)), 3, {"action0": torch.ones(3, 3, dtype=torch.bool)})


# --- compilation and value scale ----------------------------------------------------------------


def test_compiled_network_has_the_same_outputs() -> None:
    network = make_network(esper_space())
    compiled = torch.compile(network, backend="eager")
    states = torch.randn(3, 4, STATE_DIM)
    starts = torch.rand(3, 4) < 0.3
    output, expected = compiled(states, None, starts), network(states, None, starts)
    torch.testing.assert_close(output.values, expected.values)
    torch.testing.assert_close(dict(output.logits), dict(expected.logits))
    assert unwrap_network(compiled) is network


def test_changed_return_scale_preserves_values() -> None:
    network = make_network(independent_heads((2,)))
    states = torch.randn(9, STATE_DIM)
    before = network(states).values
    returns = 50 * torch.rand(3, 3)
    valid = torch.ones(3, 3, dtype=torch.bool)
    network.update_return_scale(returns, valid)
    expected = float(returns.square().mean().sqrt())
    assert float(network.return_scale) == pytest.approx(expected)
    torch.testing.assert_close(network(states).values, before, atol=1e-5, rtol=1e-5)
