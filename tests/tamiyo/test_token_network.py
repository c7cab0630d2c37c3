"""The network over tokens: any order, any number, the rule's advice, exact sequences.

Shapes: `N` rows, `T` time, `S` slots, `P` blueprints, `W` width of a token.
"""

import copy
import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.leyline import LifecycleOp, UnknownNameError
from esper.tamiyo import TokenActorCritic, TokenLayout, choose, logits_given
from esper.tamiyo.network import RecurrentActorCritic
from esper.tamiyo.token_layout import ADVISED, WIDTHS
from esper.tamiyo.token_network import MEMORY, WIDTH, Exchange
from tests.tamiyo.spaces import esper_space, random_legality

NARROW, WIDE = TokenLayout(3, 4), TokenLayout(5, 6)


@functools.cache
def any_network() -> TokenActorCritic:
    """One whose corrections are not zero."""
    network = TokenActorCritic(NARROW).double()
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for head in (*network.heads, network.value_head):
            for parameter in head.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=chance).double()
    return network


def any_states(layout: TokenLayout, seed: int, *shape: int) -> Tensor:
    """[*shape, F] float64, in which all is present and everything else is made up."""
    chance = torch.Generator().manual_seed(seed)
    states = torch.randn(*shape, layout.state_dim, generator=chance, dtype=torch.float64)
    _, own, seeds = layout.split(states)
    own[..., 0] = seeds[..., 0] = 1.0
    return states


def joined(whole: Tensor, own: Tensor, seeds: Tensor) -> Tensor:
    return torch.cat((whole, own.flatten(-2), seeds.flatten(-3)), -1)


def moved(tokens: Tensor, slots: Tensor, kinds: Tensor, layout: TokenLayout) -> Tensor:
    """[1, N, M * D]: the memory of every token in another order."""
    each = tokens.unflatten(-1, (-1, MEMORY))
    own, seeds = each[..., 1 : 1 + layout.slots, :], each[..., 1 + layout.slots :, :]
    seeds = seeds.unflatten(-2, (layout.slots, -1))[:, :, slots][:, :, :, kinds]
    return torch.cat((each[..., :1, :], own[:, :, slots], seeds.flatten(-3, -2)), -2).flatten(-2)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_the_order_of_slots_and_blueprints_permutes_what_is_preferred(seed: int) -> None:
    network, chance = any_network(), torch.Generator().manual_seed(seed)
    slots, kinds = (torch.randperm(size, generator=chance) for size in (3, 4))
    states = any_states(NARROW, seed, 2)
    memory = torch.randn(2, 1, 2, network.lstm_hidden_dim, generator=chance).double()
    whole, own, seeds = NARROW.split(states)
    turned = joined(whole, own[:, slots], seeds[:, slots][:, :, kinds])
    first = network(states, (memory[0], memory[1]))
    again = moved(memory[0], slots, kinds, NARROW), moved(memory[1], slots, kinds, NARROW)
    second = network(turned, again)
    op, slot, kind, blend = first.logits
    expected = (op, slot[..., slots], kind[:, slots][..., kinds], blend[:, slots][:, :, kinds])
    for want, found in zip((*expected, first.values), (*second.logits, second.values), strict=True):
        torch.testing.assert_close(found, want)
    for want, found in zip(first.hidden, second.hidden, strict=True):
        torch.testing.assert_close(found, moved(want, slots, kinds, NARROW))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_room_for_more_changes_nothing(seed: int) -> None:
    network = any_network()
    states = any_states(NARROW, seed, 2, 3)
    whole, own, seeds = NARROW.split(states)
    more = torch.nn.functional.pad
    padded = joined(whole, more(own, (0, 0, 0, 2)), more(seeds, (0, 0, 0, 2, 0, 2)))
    starts = torch.tensor([[True, False, True], [False, False, True]])
    narrow = network(states, None, starts)
    wide = network.laid_out(WIDE)(padded, None, starts)
    op, slot, kind, blend = wide.logits
    inner = (op, slot[..., :3], kind[..., :3, :4], blend[..., :3, :4, :], wide.values)
    for want, found in zip((*narrow.logits, narrow.values), inner, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)
    assert network.layout is NARROW


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20), steps=st.integers(0, 3),
       size=st.sampled_from([(1, 20), (8, 7), (4, 30), (12, 1)]))  # fmt: skip
def test_rows_are_computed_in_the_least_room_as_in_all_of_it(
    seed: int, steps: int, size: tuple[int, int]
) -> None:
    layout, rows = TokenLayout(*size), 9
    network = any_network().laid_out(layout)
    chance = torch.Generator().manual_seed(seed)
    states = any_states(layout, seed, rows, *[steps] * bool(steps))
    starts = torch.rand(states.shape[:-1], generator=chance) < 0.4
    memory = torch.randn(2, 1, rows, network.lstm_hidden_dim, generator=chance).double()
    here = torch.zeros(rows, layout.slots, layout.blueprints, dtype=torch.bool)
    _, own, seeds = layout.split(states)
    for row in range(rows):
        room = (layout.slots, layout.blueprints)
        slots, kinds = (int(torch.randint(1, n + 1, (), generator=chance)) for n in room)
        if row == 0:  # a room that is wide enough may have more slots than the layout
            slots, kinds = 1, min(5, layout.blueprints)
        here[row, :slots, :kinds] = True
        own[row, ..., slots:, :], seeds[row, ..., slots:, :, :] = 0.0, 0.0
        seeds[row, ..., kinds:, :] = 0.0
    found = network(states, (memory[0], memory[1]), starts)
    whole = RecurrentActorCritic.forward(network, states, (memory[0], memory[1]), starts)
    alike = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-10)
    alike(found.values, whole.values)
    alike(found.logits[0], whole.logits[0])
    for row in range(rows):
        slots, kinds = int(here[row].any(1).sum()), int(here[row].any(0).sum())
        for ours, theirs in zip(found.logits[1:], whole.logits[1:], strict=True):
            assert ours.shape == theirs.shape
        alike(found.logits[1][row, ..., :slots], whole.logits[1][row, ..., :slots])
        alike(found.logits[2][row, ..., :slots, :kinds], whole.logits[2][row, ..., :slots, :kinds])
        ours, theirs = (each.logits[3][row, ..., :slots, :kinds, :] for each in (found, whole))
        alike(ours, theirs)
    if steps:
        assert found.hidden is whole.hidden is None
        return
    there = torch.cat((torch.ones(rows, 1).bool(), here.any(2), here.flatten(1)), 1)
    for ours, theirs in zip(found.hidden, whole.hidden, strict=True):
        tokens = [each[0].unflatten(-1, (-1, MEMORY))[there] for each in (ours, theirs)]
        alike(*tokens)


def test_the_weights_do_not_depend_on_the_layout_and_are_few() -> None:
    small, large = TokenActorCritic(TokenLayout(1, 1)), TokenActorCritic(TokenLayout(20, 15))
    shapes = [{n: t.shape for n, t in each.state_dict().items()} for each in (small, large)]
    assert shapes[0] == shapes[1]
    assert sum(parameter.numel() for parameter in small.parameters()) <= 150_000
    assert large.space == esper_space(20, 15)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**20), slots=st.integers(1, 3), kinds=st.integers(1, 4))
def test_without_training_the_likeliest_action_is_the_advised_one(
    seed: int, slots: int, kinds: int
) -> None:
    rows, chance = 6, torch.Generator().manual_seed(seed)
    legal = random_legality(esper_space(slots, kinds), rows, chance)
    noise = torch.zeros(rows, len(legal.space), max(legal.space.sizes))
    advice = choose(noise, legal, generator=chance).actions
    states = any_states(NARROW, seed, rows).float()
    whole, own, seeds = NARROW.split(states)
    for tokens, size in zip((whole, own, seeds), ADVISED, strict=True):
        tokens[..., -size:] = 0.0
    every = torch.arange(rows)
    op, slot, kind, blend = advice.unbind(1)
    whole[every, WIDTHS[0] - ADVISED[0] + op] = 1.0
    own[every, slot, -1] = (op != LifecycleOp.WAIT).float()
    plants = (op == LifecycleOp.GERMINATE).float()
    seeds[every, slot, kind, WIDTHS[2] - ADVISED[2] + blend] = plants
    network = TokenActorCritic(NARROW)
    choice, _, _ = network.get_action(states, NARROW.widen(legal), greedy=True)
    assert torch.equal(choice.actions, advice)
    network.prefer("op", LifecycleOp.PRUNE, 50.0)
    choice, _, _ = network.get_action(states, NARROW.widen(legal), greedy=True)
    may = legal.masks["op"][:, LifecycleOp.PRUNE]
    assert bool((choice.actions[may, 0] == LifecycleOp.PRUNE).all())
    assert torch.equal(choice.actions[~may], advice[~may])
    with pytest.raises(UnknownNameError, match="meanings of their own"):
        network.prefer("slot", 0, 1.0)


def test_how_much_the_advice_counts_is_learned_for_each_op_and_blend() -> None:
    network, states = TokenActorCritic(NARROW), any_states(NARROW, 5, 2).float()
    for tokens, size in zip(NARROW.split(states), ADVISED, strict=True):
        tokens[..., -size:] = 1.0  # everything is advised
    with torch.no_grad():
        for number, trust in enumerate(network.trust.values()):
            trust.copy_(10.0 * number + torch.arange(len(trust)))
    op, slot, kind, blend = network(states, None).logits
    trust = {name: each.detach() for name, each in network.trust.items()}
    torch.testing.assert_close(op, trust["op"].expand_as(op))
    torch.testing.assert_close(slot, trust["slot"][:, None].expand_as(slot))
    torch.testing.assert_close(kind, trust["seed"].sum().expand_as(kind))
    torch.testing.assert_close(blend, trust["seed"].expand_as(blend))
    sum(each.sum() for each in (op, slot, kind, blend)).backward()  # type: ignore[union-attr]
    assert all(bool((each.grad != 0).all()) for each in network.trust.values())


def test_a_head_is_chosen_by_what_the_earlier_choices_make_of_it() -> None:
    space, chance = esper_space(2, 3), torch.Generator().manual_seed(0)
    shapes = [(5,), (5, 2), (2, 3), (2, 3, 3)]
    tables = tuple(torch.randn(4, *shape, generator=chance) for shape in shapes)
    legal = random_legality(space, 4, chance)
    choice = choose(tables, legal, generator=chance)
    logits = logits_given(tables, space, choice.actions)
    for row, (op, slot, kind, _) in enumerate(choice.actions.tolist()):
        assert torch.equal(logits[row, 0], tables[0][row])
        assert torch.equal(logits[row, 1, :2], tables[1][row, op])
        assert torch.equal(logits[row, 2, :3], tables[2][row, slot])
        assert torch.equal(logits[row, 3, :3], tables[3][row, slot, kind])
    assert torch.equal(choice.masks, legal.resolved(choice.actions))
    # Greedily the likeliest of each head, of which no composite action that is legal is better.
    best = choose(tables, legal, greedy=True).actions
    for row, head in itertools.product(range(4), range(4)):
        open_ = legal.resolved(best)[row, head]
        own = logits_given(tables, space, best)[row, head].masked_fill(~open_, -torch.inf)
        assert int(own.argmax()) == int(best[row, head])


def test_sequences_with_episodes_that_begin_inside_find_the_same_as_steps() -> None:
    network = copy.deepcopy(any_network()).float()
    states = any_states(NARROW, 1, 3, 7).float()
    chance = torch.Generator().manual_seed(2)
    starts = torch.rand(3, 7, generator=chance) < 0.3
    memory = torch.randn(2, 1, 3, network.lstm_hidden_dim, generator=chance)
    hidden = before = (memory[0], memory[1])
    legal = random_legality(NARROW.space, 3, chance)
    taken = []
    for step in range(7):
        choice, values, hidden = network.get_action(
            states[:, step], legal, hidden, starts[:, step], generator=chance
        )
        taken.append((*choice, values))
    actions, masks, log_probs, values = (torch.stack(each, 1) for each in zip(*taken, strict=True))
    with torch.no_grad():
        again = network.evaluate_actions(states, actions, masks, before, starts)
    assert float(torch.expm1(again.log_probs - log_probs).abs().max()) < 1e-4
    torch.testing.assert_close(again.values, values)
    assert bool((log_probs.exp() > 0.999).any() & (log_probs.exp() < 0.9).any())


def test_tokens_hear_what_a_loop_over_them_says() -> None:
    """Of some padding: slot 2, and the last blueprint of slot 1."""
    exchange = Exchange(WIDTH).double()
    chance = torch.Generator().manual_seed(0)
    whole, own, seeds = (
        torch.randn(*shape, WIDTH, generator=chance).double() for shape in ((), (3,), (3, 4))
    )
    slots = torch.tensor([1.0, 1.0, 0.0]).double()[:, None]
    kinds = torch.ones(3, 4, 1, dtype=torch.float64)
    kinds[2] = kinds[1, 3] = 0.0
    found = exchange((whole, own, seeds), slots, kinds)

    def heard(part: torch.nn.Module, token: Tensor, *others: Tensor) -> Tensor:
        ways = list(part.ways)
        total = sum(way(other) for way, other in zip(ways, (token, *others), strict=True))
        return token + part.norm(total).clamp(min=0.0)

    present = [[kind for kind in range(4) if kinds[slot, kind]] for slot in range(3)]
    new = torch.zeros_like(seeds)
    for slot, row in enumerate(present):
        for kind in row:
            alike = torch.stack([seeds[s, kind] for s in range(3) if kinds[s, kind]]).mean(0)
            new[slot, kind] = heard(exchange.seeds, seeds[slot, kind], own[slot], whole, alike)
            torch.testing.assert_close(found[2][slot, kind], new[slot, kind])
    places = []
    for slot in range(2):
        row = new[slot, present[slot]]
        places.append(heard(exchange.own, own[slot], row.mean(0), row.amax(0), whole))
        torch.testing.assert_close(found[1][slot], places[-1])
    both = torch.stack(places)
    torch.testing.assert_close(found[0], heard(exchange.whole, whole, both.mean(0), both.amax(0)))
