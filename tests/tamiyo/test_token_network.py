"""The network over tokens: order, padding, the rule's proposal, exact sequences.

Shapes: `N` rows, `T` time, `S` slots, `P` blueprints, `M` tokens, `W` width of a token, `D` hidden
size of a token.
"""

import copy
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from esper.leyline import LifecycleOp, UnknownNameError
from esper.tamiyo import TokenActorCritic, TokenLayout, sample_actions
from esper.tamiyo.token_layout import ADVISED, WIDTHS
from esper.tamiyo.token_network import TOKEN_HIDDEN_DIM, TOKEN_WIDTH, Aggregate, TokenMixing
from tests.tamiyo.spaces import esper_space, random_legality

NARROW = TokenLayout(3, 4)
WIDE = TokenLayout(5, 6)


@functools.cache
def trained_network() -> TokenActorCritic:
    """Return a float64 network whose corrections of the proposal are not zero."""
    network = TokenActorCritic(NARROW).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for head in (*network.heads.values(), network.value_head):
            for parameter in head.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator).double()
    return network


def random_states(layout: TokenLayout, seed: int, *shape: int) -> Tensor:
    """Return random float64 states [*shape, F] without padding."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(*shape, layout.state_dim, generator=generator, dtype=torch.float64)
    _, slots, candidates = layout.split(states)
    slots[..., 0] = 1.0
    candidates[..., 0] = 1.0
    return states


def join_tokens(global_token: Tensor, slots: Tensor, candidates: Tensor) -> Tensor:
    return torch.cat((global_token, slots.flatten(-2), candidates.flatten(-3)), -1)


def split_hidden(hidden: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Split a hidden state [1, N, M * D] into [..., 1, D], [..., S, D] and [..., S, P, D]."""
    per_token = hidden.unflatten(-1, (-1, TOKEN_HIDDEN_DIM))
    sizes = (1, layout.slots, layout.slots * layout.blueprints)
    global_token, slots, candidates = per_token.split(sizes, -2)
    return global_token, slots, candidates.unflatten(-2, (layout.slots, -1))


def permute_hidden(
    hidden: Tensor, slot_order: Tensor, blueprint_order: Tensor, layout: TokenLayout
) -> Tensor:
    global_token, slots, candidates = split_hidden(hidden, layout)
    slots = slots[:, :, slot_order]
    candidates = candidates[:, :, slot_order][:, :, :, blueprint_order]
    return torch.cat((global_token, slots, candidates.flatten(-3, -2)), -2).flatten(-2)


# --- order and padding --------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_order_of_slots_and_blueprints_permutes_the_output(seed: int) -> None:
    network, generator = trained_network(), torch.Generator().manual_seed(seed)
    slot_order = torch.randperm(NARROW.slots, generator=generator)
    blueprint_order = torch.randperm(NARROW.blueprints, generator=generator)
    states = random_states(NARROW, seed, 2)
    hidden = torch.randn(2, 1, 2, network.lstm_hidden_dim, generator=generator).double()
    global_token, slots, candidates = NARROW.split(states)
    permuted_states = join_tokens(
        global_token, slots[:, slot_order], candidates[:, slot_order][:, :, blueprint_order]
    )
    permuted_h, permuted_c = (
        permute_hidden(part, slot_order, blueprint_order, NARROW) for part in hidden
    )
    output = network(states, (hidden[0], hidden[1]))
    permuted = network(permuted_states, (permuted_h, permuted_c))
    expected_logits = {
        "op": output.logits["op"],
        "slot": output.logits["slot"][..., slot_order],
        "blueprint": output.logits["blueprint"][:, slot_order][..., blueprint_order],
        "blend": output.logits["blend"][:, slot_order][:, :, blueprint_order],
    }
    torch.testing.assert_close(dict(permuted.logits), expected_logits)
    torch.testing.assert_close(permuted.values, output.values)
    for part, original in zip(permuted.hidden, output.hidden, strict=True):
        expected = permute_hidden(original, slot_order, blueprint_order, NARROW)
        torch.testing.assert_close(part, expected)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    num_slots=st.integers(1, 5),
    num_blueprints=st.integers(1, 6),
    num_steps=st.integers(0, 3),
)
def test_padding_does_not_change_the_output(
    seed: int, num_slots: int, num_blueprints: int, num_steps: int
) -> None:
    """For single steps (`num_steps` 0) and sequences, with any hidden state in the padding."""
    layout, rows = TokenLayout(num_slots, num_blueprints), 2
    exact = trained_network().with_layout(layout)
    padded = trained_network().with_layout(WIDE)
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, num_steps) if num_steps else (rows,)
    states = random_states(layout, seed, *shape)
    starts = torch.rand(shape, generator=generator) < 0.4
    extra_slots = WIDE.slots - num_slots
    extra_blueprints = WIDE.blueprints - num_blueprints
    global_token, slots, candidates = layout.split(states)
    padded_states = join_tokens(
        global_token,
        pad(slots, (0, 0, 0, extra_slots)),
        pad(candidates, (0, 0, 0, extra_blueprints, 0, extra_slots)),
    )
    padded_hidden = torch.randn(2, 1, rows, padded.lstm_hidden_dim, generator=generator).double()

    def without_padding(hidden: Tensor) -> Tensor:
        global_part, slot_part, candidate_part = split_hidden(hidden, WIDE)
        slot_part = slot_part[..., :num_slots, :]
        candidate_part = candidate_part[..., :num_slots, :num_blueprints, :].flatten(-3, -2)
        return torch.cat((global_part, slot_part, candidate_part), -2).flatten(-2)

    exact_hidden = (without_padding(padded_hidden[0]), without_padding(padded_hidden[1]))
    expected = exact(states, exact_hidden, starts)
    output = padded(padded_states, (padded_hidden[0], padded_hidden[1]), starts)
    logits = {
        "op": output.logits["op"],
        "slot": output.logits["slot"][..., :num_slots],
        "blueprint": output.logits["blueprint"][..., :num_slots, :num_blueprints],
        "blend": output.logits["blend"][..., :num_slots, :num_blueprints, :],
    }
    torch.testing.assert_close(logits, dict(expected.logits), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.values, expected.values, rtol=1e-6, atol=1e-6)
    if num_steps:
        assert output.hidden is expected.hidden is None
    else:
        for part, expected_part in zip(output.hidden, expected.hidden, strict=True):
            torch.testing.assert_close(without_padding(part), expected_part)


def test_network_with_another_layout_shares_weights() -> None:
    network = trained_network()
    wide = network.with_layout(WIDE)
    assert network.layout is NARROW
    assert wide.layout is WIDE
    assert wide.action_space == esper_space(5, 6)
    for parameter, shared in zip(network.parameters(), wide.parameters(), strict=True):
        assert parameter is shared


def test_weights_are_few_and_do_not_depend_on_the_layout() -> None:
    small, large = TokenActorCritic(TokenLayout(1, 1)), TokenActorCritic(TokenLayout(20, 15))
    shapes = [
        {name: tensor.shape for name, tensor in network.state_dict().items()}
        for network in (small, large)
    ]
    assert shapes[0] == shapes[1]
    assert sum(parameter.numel() for parameter in small.parameters()) <= 150_000
    assert large.action_space == esper_space(20, 15)


# --- the rule's proposal ------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**20), num_slots=st.integers(1, 3), num_blueprints=st.integers(1, 4))
def test_untrained_network_takes_the_proposed_action(
    seed: int, num_slots: int, num_blueprints: int
) -> None:
    rows, generator = 6, torch.Generator().manual_seed(seed)
    space = esper_space(num_slots, num_blueprints)
    legality = random_legality(space, rows, generator)
    uniform = {n: torch.zeros(rows, size) for n, size in zip(space.names, space.sizes, strict=True)}
    proposal = sample_actions(uniform, legality, generator=generator).actions

    # Mark the proposal in the states.
    states = random_states(NARROW, seed, rows).float()
    global_token, slots, candidates = NARROW.split(states)
    for tokens, size in zip((global_token, slots, candidates), ADVISED, strict=True):
        tokens[..., -size:] = 0.0
    row = torch.arange(rows)
    op, slot, blueprint, blend = proposal.unbind(1)
    global_token[row, WIDTHS[0] - ADVISED[0] + op] = 1.0
    slots[row, slot, -1] = (op != LifecycleOp.WAIT).float()
    plants = (op == LifecycleOp.GERMINATE).float()
    candidates[row, slot, blueprint, WIDTHS[2] - ADVISED[2] + blend] = plants

    network = TokenActorCritic(NARROW)
    padded_legality = NARROW.widen(legality)
    sampled, _, _ = network.get_action(states, padded_legality, greedy=True)
    assert torch.equal(sampled.actions, proposal)

    # A bias of the initial policy overrules the proposal where it is legal.
    network.bias_action_logit("op", LifecycleOp.PRUNE, 50.0)
    sampled, _, _ = network.get_action(states, padded_legality, greedy=True)
    may_prune = legality.masks["op"][:, LifecycleOp.PRUNE]
    assert bool((sampled.actions[may_prune, 0] == LifecycleOp.PRUNE).all())
    assert torch.equal(sampled.actions[~may_prune], proposal[~may_prune])


def test_bias_of_a_slot_raises() -> None:
    with pytest.raises(UnknownNameError, match="head whose actions have a bias"):
        TokenActorCritic(NARROW).bias_action_logit("slot", 0, 1.0)


def test_rule_logits_are_learned_for_each_op_and_blend() -> None:
    network, states = TokenActorCritic(NARROW), random_states(NARROW, 5, 2).float()
    for tokens, size in zip(NARROW.split(states), ADVISED, strict=True):
        tokens[..., -size:] = 1.0  # everything is proposed
    scales = network.rule_logit_scale
    with torch.no_grad():
        for number, scale in enumerate(scales.values()):
            scale.copy_(10.0 * number + torch.arange(len(scale)))
    logits = network(states, None).logits
    expected = {
        "op": scales["op"],
        "slot": scales["slot"][:, None],
        "blueprint": scales["seed"].sum(),
        "blend": scales["seed"],
    }
    for name, head_logits in logits.items():
        torch.testing.assert_close(head_logits, expected[name].expand_as(head_logits))
    total = sum(head_logits.sum() for head_logits in logits.values())
    total.backward()  # type: ignore[union-attr]
    assert all(bool((scale.grad != 0).all()) for scale in scales.values())


# --- sequences ----------------------------------------------------------------------------------


def test_sequences_with_resets_equal_steps() -> None:
    network = copy.deepcopy(trained_network()).float()
    states = random_states(NARROW, 1, 3, 7).float()
    generator = torch.Generator().manual_seed(2)
    starts = torch.rand(3, 7, generator=generator) < 0.3
    random_hidden = torch.randn(2, 1, 3, network.lstm_hidden_dim, generator=generator)
    hidden = initial_hidden = (random_hidden[0], random_hidden[1])
    legality = random_legality(NARROW.space, 3, generator)
    steps = []
    for step in range(7):
        sampled, values, hidden = network.get_action(
            states[:, step], legality, hidden, starts[:, step], generator=generator
        )
        steps.append((*sampled[:3], values))
    actions, masks, log_probs, values = (
        torch.stack(tensors, 1) for tensors in zip(*steps, strict=True)
    )
    with torch.no_grad():
        evaluation = network.evaluate_actions(states, actions, masks, initial_hidden, starts)
    assert float(torch.expm1(evaluation.log_probs - log_probs).abs().max()) < 1e-4
    torch.testing.assert_close(evaluation.values, values)
    probabilities = log_probs.exp()
    assert bool((probabilities > 0.999).any() & (probabilities < 0.9).any())


# --- mixing -------------------------------------------------------------------------------------


def test_mixing_equals_a_loop_over_tokens() -> None:
    """Slot 2 and the last blueprint of slot 1 are padding."""
    num_slots, num_blueprints = 3, 4
    mixing = TokenMixing(TOKEN_WIDTH).double()
    generator = torch.Generator().manual_seed(0)
    global_token, slots, candidates = (
        torch.randn(*shape, TOKEN_WIDTH, generator=generator).double()
        for shape in ((), (num_slots,), (num_slots, num_blueprints))
    )
    has_slot = torch.tensor([1.0, 1.0, 0.0]).double()[:, None]
    has_candidate = torch.ones(num_slots, num_blueprints, 1, dtype=torch.float64)
    has_candidate[2] = 0.0
    has_candidate[1, 3] = 0.0
    mixed_global, mixed_slots, mixed_candidates = mixing(
        (global_token, slots, candidates), has_slot, has_candidate
    )

    def aggregate(module: Aggregate, token: Tensor, *others: Tensor) -> Tensor:
        total = torch.zeros_like(token)
        for layer, source in zip(module.sources, (token, *others), strict=True):
            total = total + layer(source)
        return token + module.norm(total).clamp(min=0.0)

    # Candidates receive their slot, the global token and the mean of their blueprint.
    expected_candidates = torch.zeros_like(candidates)
    for slot in range(num_slots):
        for blueprint in range(num_blueprints):
            if not has_candidate[slot, blueprint]:
                continue
            same_blueprint = [
                candidates[other_slot, blueprint]
                for other_slot in range(num_slots)
                if has_candidate[other_slot, blueprint]
            ]
            expected_candidates[slot, blueprint] = aggregate(
                mixing.candidates,
                candidates[slot, blueprint],
                slots[slot],
                global_token,
                torch.stack(same_blueprint).mean(0),
            )
            torch.testing.assert_close(
                mixed_candidates[slot, blueprint], expected_candidates[slot, blueprint]
            )

    # Slots receive mean and maximum of their candidates, and the global token.
    expected_slots = []
    for slot in range(2):
        present = expected_candidates[slot, has_candidate[slot, :, 0] > 0]
        mean, maximum = present.mean(0), present.amax(0)
        expected_slots.append(aggregate(mixing.slots, slots[slot], mean, maximum, global_token))
        torch.testing.assert_close(mixed_slots[slot], expected_slots[-1])

    # The global token receives mean and maximum of the slots.
    stacked = torch.stack(expected_slots)
    expected_global = aggregate(mixing.global_token, global_token, stacked.mean(0), stacked.amax(0))
    torch.testing.assert_close(mixed_global, expected_global)
