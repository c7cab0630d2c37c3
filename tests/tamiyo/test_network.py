"""The network: sequences, resets, heads, and the agreement of its two entry points."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

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
    RunningNorm,
    independent_heads,
    run_sequences,
    unwrapped,
)
from tests.tamiyo.spaces import esper_space, random_legality

STATE = 6
HIDDEN = DEFAULT_LSTM_HIDDEN_DIM // 8


def make(space: ActionSpace, layers: int = 1) -> FactoredRecurrentActorCritic:
    torch.manual_seed(0)
    network = FactoredRecurrentActorCritic(space, STATE, HIDDEN, layers)
    for head in network.heads:
        nn.init.normal_(head[-1].weight, std=0.5)  # probabilities that differ
    return network


def by_step(
    lstm: nn.LSTM, inputs: Tensor, hidden: tuple[Tensor, Tensor], starts: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    outputs = []
    for time in range(inputs.shape[1]):
        keep = (~starts[:, time]).float()[None, :, None]
        hidden = (hidden[0] * keep, hidden[1] * keep)
        output, hidden = lstm(inputs[:, time : time + 1], hidden)
        outputs.append(output)
    return torch.cat(outputs, 1), hidden


@settings(max_examples=60)
@given(
    rows=st.integers(1, 6),
    time=st.integers(1, 12),
    layers=st.integers(1, 2),
    rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_whole_sequences_equal_a_loop_over_steps_wherever_the_resets_are(
    rows: int, time: int, layers: int, rate: float, seed: int
) -> None:
    torch.manual_seed(seed)
    lstm = nn.LSTM(HIDDEN, HIDDEN, layers, batch_first=True)
    inputs = torch.randn(rows, time, HIDDEN)
    hidden = (torch.randn(layers, rows, HIDDEN), torch.randn(layers, rows, HIDDEN))
    starts = torch.rand(rows, time) < rate
    expected, _ = by_step(lstm, inputs, hidden, starts)
    found = run_sequences(lstm, inputs, hidden, starts)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_sequences_of_another_shape_with_the_same_starts_in_a_row_are_cut_where_theirs_are() -> (
    None
):
    torch.manual_seed(0)
    lstm = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
    flat = torch.rand(24) < 0.3
    for rows in (1, 2, 3, 2, 1):
        starts, inputs = flat.view(rows, -1), torch.randn(rows, 24 // rows, HIDDEN)
        hidden = (torch.randn(1, rows, HIDDEN), torch.randn(1, rows, HIDDEN))
        expected, _ = by_step(lstm, inputs, hidden, starts)
        found = run_sequences(lstm, inputs, hidden, starts)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_gradients_through_cut_sequences_equal_those_of_the_loop() -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
    hidden = (torch.randn(1, 4, HIDDEN), torch.randn(1, 4, HIDDEN))
    starts = torch.rand(4, 9) < 0.3
    inputs = torch.randn(4, 9, HIDDEN)
    grads = []
    for run in (lambda *given: by_step(*given)[0], run_sequences):
        leaf = inputs.clone().requires_grad_()
        outputs = run(lstm, leaf, hidden, starts)
        grads.append(torch.autograd.grad(outputs.square().sum(), [leaf, *lstm.parameters()]))
    for expected, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_memory_that_is_not_a_number_does_not_outlive_its_episode() -> None:
    lstm = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
    broken = torch.full((1, 2, HIDDEN), math.nan)
    starts = torch.tensor([[True, False], [True, True]])
    outputs = run_sequences(lstm, torch.randn(2, 2, HIDDEN), (broken, broken), starts)
    assert bool(outputs.isfinite().all())


@pytest.mark.parametrize("space", [esper_space(), esper_space(16), independent_heads((4, 2, 9))])
@pytest.mark.parametrize("layers", [1, 2])
def test_acting_step_by_step_and_evaluating_sequences_agree_over_resets(
    space: ActionSpace, layers: int
) -> None:
    rows, time = 5, 14
    network, draw = make(space, layers), torch.Generator().manual_seed(1)
    states = torch.randn(rows, time, STATE, generator=draw)
    starts = torch.rand(rows, time, generator=draw) < 0.3
    first = hidden = network.get_initial_hidden(rows)
    steps = []
    for step in range(time):
        legality = random_legality(space, rows, draw)
        choice, value, hidden = network.get_action(
            states[:, step], legality, hidden, starts[:, step], generator=draw
        )
        assert bool(legality.permits(Actions(space, choice.actions)).all())
        steps.append((*choice, value))
    actions, masks, log_probs, values = (torch.stack(part, 1) for part in zip(*steps, strict=True))
    found = network.evaluate_actions(states, actions, masks, first, starts)
    torch.testing.assert_close(found.log_probs, log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.values, values, atol=1e-5, rtol=0)
    assert found.log_probs.requires_grad
    assert not log_probs.requires_grad


def test_a_head_that_does_not_matter_is_canonical_with_log_prob_zero_and_no_gradient() -> None:
    space, rows = esper_space(), 64
    network, draw = make(space), torch.Generator().manual_seed(2)
    states = torch.randn(rows, STATE, generator=draw)
    choice, _, _ = network.get_action(states, random_legality(space, rows, draw), generator=draw)
    relevant = torch.tensor(space.relevance)[choice.actions[:, 0]]
    assert bool((choice.actions[~relevant] == CANONICAL_ACTION).all())
    assert bool((choice.log_probs[~relevant] == 0).all())
    waiting = choice.actions[:, 0] == LifecycleOp.WAIT
    assert bool(waiting.any())
    assert not bool(waiting.all())

    outlook = network(states)
    logits = outlook.logits.detach().requires_grad_()
    chosen = MaskedCategorical(logits, choice.masks)
    weight = torch.randn(rows, len(space), generator=draw)
    (weight * (chosen.log_prob(choice.actions) + chosen.entropy())).sum().backward()
    assert logits.grad is not None
    assert bool((logits.grad[~relevant] == 0).all())
    assert bool((logits.grad[~choice.masks] == 0).all())
    assert bool((logits.grad[:, 0] != 0).any())


def test_later_heads_are_masked_by_the_choices_of_earlier_ones() -> None:
    space, rows = esper_space(), 500
    masks = random_legality(space, rows, torch.Generator().manual_seed(3)).masks
    legality = Legality(space, rows, masks)
    network = make(space)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        choice, _, _ = network.get_action(torch.randn(rows, STATE), legality, generator=generator)
        assert bool(legality.permits(Actions(space, choice.actions)).all())


def test_a_head_without_a_legal_action_is_named() -> None:
    space = esper_space()
    masks = {"op": torch.ones(3, space.size("op"), dtype=torch.bool)}
    masks["op"][1] = False
    network = make(space)
    with pytest.raises(InvalidStateMachineError, match=r"'op'.*row \[1\]"):
        network.get_action(torch.randn(3, STATE), Legality(space, 3, masks))


def test_the_initialisation_is_the_documented_one() -> None:
    network = FactoredRecurrentActorCritic(esper_space(), STATE)
    assert network.lstm_hidden_dim == DEFAULT_LSTM_HIDDEN_DIM
    bias = network.lstm.bias_ih_l0 + network.lstm.bias_hh_l0
    forget = bias.chunk(4)[1]
    assert bool((forget == 1).all())
    assert torch.equal(bias.sum(), forget.sum())
    for head, size in zip(network.heads, network.space.sizes, strict=True):
        inner, outer = head[0].weight, head[-1].weight
        assert inner.shape == (DEFAULT_LSTM_HIDDEN_DIM // 2, DEFAULT_LSTM_HIDDEN_DIM)
        torch.testing.assert_close(outer @ outer.T, 0.01**2 * torch.eye(size), atol=1e-7, rtol=0)
        torch.testing.assert_close(inner @ inner.T, 2 * torch.eye(len(inner)), atol=1e-4, rtol=0)
    assert network.value_head[-1].weight.norm().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_initial_memory_takes_device_and_type(dtype: torch.dtype) -> None:
    network = make(esper_space()).to(dtype)
    states = torch.randn(3, STATE, dtype=dtype)
    assert network.get_initial_hidden(3)[0].dtype == dtype
    assert network.get_initial_hidden(3, "meta", torch.float16)[1].device.type == "meta"
    outlook = network(states)
    assert outlook.hidden[0].dtype == outlook.hidden[1].dtype == dtype


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda n, g: n(torch.zeros(3, STATE + 1)), rf"valid: \[rows, {STATE}\]"),
        (lambda n, g: n(torch.zeros(STATE)), "wrong shape"),
        (lambda n, g: n.get_action(torch.zeros(2, STATE), g), rf"valid: \[3, {STATE}\]"),
        (lambda n, g: n.get_action(torch.zeros(3, 1, STATE), g), rf"valid: \[3, {STATE}\]"),
        (
            lambda n, g: n.evaluate_actions(
                torch.zeros(3, 2, STATE), torch.zeros(3, 2, 1), torch.zeros(3, 2, 4)
            ),
            r"Actions .* valid: \[3, 2, 4\]",
        ),
        (
            lambda n, g: n.evaluate_actions(
                torch.zeros(3, 2, STATE), torch.zeros(3, 2, 4), torch.zeros(3, 2, 4)
            ),
            r"Masks .* valid: \[3, 2, 4, 5\]",
        ),
        (
            lambda n, g: n(torch.zeros(3, 2, STATE), None, torch.zeros(3, dtype=torch.bool)),
            r"valid: torch.bool \[3, 2\]",
        ),
    ],
)
def test_wrong_shapes_are_refused_with_the_expected_one(call, message: str) -> None:
    network = make(esper_space())
    with pytest.raises(AgreementError, match=message):
        call(network, Legality(network.space, 3, {}))


def test_impossible_sizes_and_foreign_networks_are_refused() -> None:
    with pytest.raises(AgreementError, match="too small"):
        FactoredRecurrentActorCritic(esper_space(), 0)
    with pytest.raises(AgreementError, match="at least one head"):
        independent_heads(())
    with pytest.raises(AgreementError, match="given: Linear"):
        unwrapped(nn.Linear(1, 1))
    with pytest.raises(ActionError, match="wrong shape"):
        Legality(independent_heads((2,)), 3, {"action0": torch.ones(3, 3, dtype=torch.bool)})


@pytest.mark.slow
def test_a_compiled_network_gives_the_same_and_can_be_unwrapped() -> None:
    network = make(esper_space())
    compiled = torch.compile(network, backend="eager")
    states = torch.randn(3, 4, STATE)
    starts = torch.rand(3, 4) < 0.3
    torch.testing.assert_close(
        compiled(states, None, starts)[:2], network(states, None, starts)[:2]
    )
    assert unwrapped(compiled) is network


def test_a_learned_controller_remembers_until_its_episode_ends() -> None:
    network = make(independent_heads((5,)))
    controller = LearnedController(network)
    assert isinstance(controller, Controller)
    legality = Legality(network.space, 2, {})
    states = torch.randn(4, 2, STATE)
    starts = torch.tensor([[1, 1], [0, 0], [0, 1], [0, 0]], dtype=torch.bool)
    for step in range(4):
        controller.act(states[step], legality, starts[step])
    assert controller._hidden is not None
    _, expected = by_step(
        network.lstm,
        network.features(states.transpose(0, 1)),
        network.get_initial_hidden(2),
        starts.T,
    )
    torch.testing.assert_close(controller._hidden[0], expected[0], atol=1e-6, rtol=0)


def test_running_normalisation_equals_that_of_all_rows_together_and_changes_only_when_told() -> (
    None
):
    torch.manual_seed(0)
    norm = RunningNorm(STATE)
    parts = [torch.randn(size, STATE) * 3 + 5 for size in (7, 1, 40)]
    for part in parts:
        norm.observe(part)
        before = norm(part)
        assert torch.equal(norm(part), before)
    norm.observe(torch.empty(0, STATE))
    few = torch.rand(3, 4) < 0.5  # the others hold nothing
    sequences = torch.randn(3, 4, STATE).masked_fill(~few[..., None], float("nan"))
    norm.observe(sequences, few)
    parts.append(sequences[few])
    everything = torch.cat(parts).double()
    torch.testing.assert_close(norm.mean, everything.mean(0))
    torch.testing.assert_close(norm.variance, everything.var(0, correction=0))
    with pytest.raises(AgreementError, match=rf"\[\.\.\., {STATE}\]"):
        norm.observe(torch.zeros(STATE))


def test_marks_stay_as_they_are_where_that_is_asked_for_and_can_be_louder() -> None:
    torch.manual_seed(0)
    rare, common = torch.rand(2, 400) < torch.tensor([[0.2], [0.8]])
    always, never = torch.ones(400), torch.zeros(400)
    measured = torch.rand(400)  # in the same range, and no mark
    rows = torch.stack((rare.float(), common.float(), always, never, measured), 1)
    kept, plain = RunningNorm(5, keeps_marks=True), RunningNorm(5)
    for norm in (kept, plain):
        for part in rows.split((100, 250, 50)):
            norm.observe(part)
    seen = kept(rows)
    assert torch.equal(seen[:, 1:], plain(rows)[:, 1:])
    assert torch.equal(seen[:, 0], rare.float())
    louder = kept.louder(seen)
    assert torch.equal(louder[:, 1:], seen[:, 1:])
    assert torch.equal(louder[:, 0] == 0, ~rare)
    assert float(louder[:, 0].std(correction=0)) == pytest.approx(1.0, abs=1e-4)
    assert torch.equal(plain.louder(seen), seen)


def test_what_is_a_mark_is_decided_once_and_a_fair_bit_does_not_jump_between_updates() -> None:
    torch.manual_seed(1)
    norm, shares = RunningNorm(4, keeps_marks=True), torch.tensor([0.5, 0.2, 0.8, 0.3])
    norm.observe(torch.empty(0, 4))  # nothing was seen, and nothing is decided
    seen, sides = [], set()
    for _ in range(60):
        norm.observe((torch.rand(100, 4) < shares).float())
        sides.add(float(norm.mean[0]) < 0.5)
        seen.append(norm(torch.zeros(4)))
    assert sides == {True, False}, "the mean of a fair bit was on both sides of a half"
    for step in torch.stack(seen).diff(dim=0):
        assert float(step.abs().max()) < 0.3
    assert torch.equal(seen[-1] == 0, torch.tensor([False, True, False, True]))


def test_what_turns_out_to_be_no_mark_is_normalised_from_then_on() -> None:
    norm, plain = RunningNorm(4, keeps_marks=True), RunningNorm(4)
    late = torch.tensor([0.0, 1.0] * 50)  # never 1 at first, and half of the time later
    for step in range(40):
        first = step == 0
        measured = torch.zeros(100) if first else torch.linspace(900, 1100, 100)
        mark = (torch.arange(100) % 5 == 0).float()
        of_late = torch.zeros(100) if first else late
        always = torch.zeros(100) if first else torch.ones(100)
        rows = torch.stack((measured, mark, of_late, always), 1)
        for each in (norm, plain):
            each.observe(rows)
    found, usual = norm(rows), plain(rows)
    assert torch.equal(found[:, 0], usual[:, 0])
    assert torch.equal(found[:, 3], usual[:, 3])
    assert torch.equal(found[:, 1:3], rows[:, 1:3])
    again = RunningNorm(4, keeps_marks=True)
    again.load_state_dict(norm.state_dict())
    for each in (norm, again):  # what was decided stays: the first is no mark any more
        each.observe(torch.zeros(10**6, 4))
    assert torch.equal(again(rows), norm(rows))
    assert float(norm(torch.zeros(4))[0]) < 0


def test_a_direct_network_learns_nothing_of_its_memory_from_values() -> None:
    network = FactoredRecurrentActorCritic(independent_heads((3,)), STATE, 8, direct=True)
    nn.init.ones_(network.value_head[-1].weight)  # it starts at zero, which would hide it
    outlook = network(torch.randn(2, 5, STATE))
    outlook.values.sum().backward()
    learned = {n.split(".")[0] for n, p in network.named_parameters() if p.grad is not None}
    assert learned == {"value_head", "features"}
    policy, value = network.features[0].weight.grad.chunk(2)  # each has a half of its own
    assert not bool(policy.any())
    assert bool(value.any())
    network(torch.randn(2, 5, STATE)).logits.sum().backward()
    assert float(network.lstm.weight_hh_l0.grad.abs().sum()) > 0


def test_a_value_tells_states_apart_that_the_memory_does_not() -> None:
    """By a memory of nothing, and so by features of the present alone, which values can shape."""
    torch.manual_seed(0)
    network = FactoredRecurrentActorCritic(independent_heads((3,)), STATE, 8, direct=True)
    for parameter in network.lstm.parameters():
        nn.init.zeros_(parameter)
    states, wanted = torch.randn(64, STATE), torch.randn(64)
    optimizer = torch.optim.Adam(network.features[0].parameters(), 1e-2)
    nn.init.ones_(network.value_head[-1].weight)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (network(states).values - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_half_of_a_memory_can_be_made_to_remember() -> None:
    torch.manual_seed(0)
    network = FactoredRecurrentActorCritic(independent_heads((3,)), STATE, 32, direct=True)

    @torch.no_grad()
    def left() -> Tensor:
        """[D]: what of a cell's content is there after thirty steps in which nothing is seen."""
        full = (torch.zeros(1, 1, 32), torch.ones(1, 1, 32))
        nothing = torch.zeros(1, 30, STATE)
        ends = [network.lstm(nothing, hidden)[1][1] for hidden in (full, (full[0], full[0]))]
        return (ends[0] - ends[1]).abs()[0, 0]

    assert float(left().max()) < 1e-4
    network.remember()
    assert float(left()[:16].mean()) < 0.2  # what the others say of it
    assert float(left()[16:].mean()) > 0.4


def test_in_a_direct_network_the_present_adds_to_what_the_memory_says() -> None:
    """By hand, from the parts: head of the memory, and the present's own word about marks."""
    torch.manual_seed(3)
    network = FactoredRecurrentActorCritic(independent_heads((3, 2)), STATE, 8, direct=True)
    for present in network.presents:
        nn.init.normal_(present.weight)  # they start next to nothing
    states = torch.eye(STATE)[torch.arange(50) % STATE]  # a mark in each
    network.observation_norm.observe(states)
    norm, found = network.observation_norm, network(states[:4]).logits
    memory = network.lstm(states[:4, None])[0][:, 0]  # marks enter it as they are
    seen = torch.tanh(network.features[0](states[:4] / norm.variance.sqrt().float()))[:, :8]
    seen = torch.tanh(network.features[1](seen))
    for place, (head, present) in enumerate(zip(network.heads, network.presents, strict=True)):
        said = head(memory) + present(seen)
        torch.testing.assert_close(found[:, place, : said.shape[-1]], said)


def test_without_layers_of_an_lstm_the_present_speaks_alone() -> None:
    torch.manual_seed(3)
    network = FactoredRecurrentActorCritic(independent_heads((3, 2)), STATE, 8, 0, direct=True)
    states = torch.randn(2, 5, STATE)
    whole, hidden = network(states), network.get_initial_hidden(2)
    for step in range(5):  # whatever came before
        outlook = network(states[:, step], hidden, torch.zeros(2, dtype=torch.bool))
        torch.testing.assert_close(outlook.logits, whole.logits[:, step])
        torch.testing.assert_close(outlook.values, whole.values[:, step])
        assert outlook.hidden is not None
    seen = torch.tanh(network.features[1](torch.tanh(network.features[0](states))[..., :8]))
    torch.testing.assert_close(whole.logits[..., 0, :], network.heads[0](seen))
    with pytest.raises(AgreementError, match="layers from 1"):
        FactoredRecurrentActorCritic(independent_heads((3,)), STATE, 8, 0)


def test_values_stay_what_they_are_when_the_return_scale_changes() -> None:
    network = make(independent_heads((2,)))
    states = torch.randn(9, STATE)
    before = network(states).values
    returns = 50 * torch.rand(3, 3)
    network.observe_returns(returns, torch.ones(3, 3, dtype=torch.bool))
    assert float(network.return_scale) == pytest.approx(float(returns.square().mean().sqrt()))
    torch.testing.assert_close(network(states).values, before, atol=1e-5, rtol=1e-5)
