"""The network with skip connections: what trains the LSTM, and what the skip heads add."""

import pytest
import torch
from torch import Tensor, nn

from esper.leyline import AgreementError
from esper.tamiyo import SkipActorCritic, independent_heads

STATE_DIM = 6
HIDDEN_DIM = 8


def make_network(
    sizes: tuple[int, ...] = (3,), hidden_dim: int = HIDDEN_DIM, layers: int = 1
) -> SkipActorCritic:
    torch.manual_seed(3)
    return SkipActorCritic(
        independent_heads(sizes),
        state_dim=STATE_DIM,
        lstm_hidden_dim=hidden_dim,
        lstm_layers=layers,
    )


def test_values_do_not_train_the_lstm() -> None:
    network = make_network()
    nn.init.ones_(network.value_head[-1].weight)  # its initial zeros would hide a gradient
    network(torch.randn(2, 5, STATE_DIM)).values.sum().backward()
    trained = {name for name, p in network.named_parameters() if p.grad is not None}
    assert {name.split(".")[0] for name in trained} == {"value_head", "input_layer"}
    assert not bool(network.input_layer.weight.grad[:HIDDEN_DIM].any())  # the policy's half
    network(torch.randn(2, 5, STATE_DIM)).logits["action0"].sum().backward()
    assert float(network.lstm.weight_hh_l0.grad.abs().sum()) > 0


def test_policy_does_not_train_the_value_features() -> None:
    network = make_network()
    output = network(torch.randn(2, 5, STATE_DIM))
    output.logits["action0"].square().sum().backward()
    trained = {name.split(".")[0] for name, p in network.named_parameters() if p.grad is not None}
    assert trained == {"lstm", "heads", "skip_heads", "input_layer", "policy_layer"}
    assert not bool(network.input_layer.weight.grad[HIDDEN_DIM:].any())  # the values' half


def test_value_features_distinguish_states_without_memory() -> None:
    network = make_network()
    for parameter in network.lstm.parameters():
        nn.init.zeros_(parameter)
    nn.init.ones_(network.value_head[-1].weight)
    states, targets = torch.randn(64, STATE_DIM), torch.randn(64)
    optimizer = torch.optim.Adam(network.input_layer.parameters(), 1e-2)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (network(states).values - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_initial_values_are_zero() -> None:
    assert not bool(make_network()(torch.randn(4, STATE_DIM)).values.any())


def test_long_memory_initialisation_keeps_half_of_the_cells() -> None:
    network = make_network(hidden_dim=32)

    @torch.no_grad()
    def remaining_memory() -> Tensor:
        """Return the rest of a cell state [D] of 1 after thirty steps without input."""
        zeros = torch.zeros(1, 1, 32)
        no_inputs = torch.zeros(1, 30, STATE_DIM)
        _, (_, from_ones) = network.lstm(no_inputs, (zeros, torch.ones(1, 1, 32)))
        _, (_, from_zeros) = network.lstm(no_inputs, (zeros, zeros))
        return (from_ones - from_zeros).abs()[0, 0]

    assert float(remaining_memory().max()) < 1e-4
    network.init_long_memory()
    assert float(remaining_memory()[:16].mean()) < 0.2
    assert float(remaining_memory()[16:].mean()) > 0.4


def test_logits_are_the_sum_of_lstm_heads_and_skip_heads() -> None:
    network = make_network((3, 2))
    for skip_head in network.skip_heads.values():
        nn.init.normal_(skip_head[0].weight)  # their initial weights are nearly zero
    states = torch.eye(STATE_DIM)[torch.arange(50) % STATE_DIM]
    network.observation_norm.observe(states)
    norm = network.observation_norm
    normalised = ((states[:4] - norm.mean) / norm.variance.sqrt()).float()
    memory = network.lstm(normalised[:, None])[0][:, 0]
    policy_inputs, value_features = network.input_layer(normalised).tanh().chunk(2, -1)
    policy_features = network.policy_layer(policy_inputs).tanh()
    logits = network(states[:4]).logits
    for name in network.action_space.names:
        expected = network.heads[name](memory) + network.skip_heads[name](policy_features)
        torch.testing.assert_close(logits[name], expected)
    nn.init.ones_(network.value_head[-1].weight)
    value_input = value_features + memory
    expected_values = network.value_head(value_input)[:, 0]
    torch.testing.assert_close(network(states[:4]).values, expected_values)


def test_network_without_lstm_layers_depends_on_the_present_only() -> None:
    network = make_network((3, 2), layers=0)
    nn.init.ones_(network.value_head[-1].weight)
    states = torch.randn(2, 5, STATE_DIM)
    sequences, hidden = network(states), network.get_initial_hidden(2)
    assert hidden[0].shape == (0, 2, 8)
    assert sequences.hidden is None
    no_starts = torch.zeros(2, dtype=torch.bool)
    for step in range(5):
        output = network(states[:, step], hidden, no_starts)
        for name in network.action_space.names:
            torch.testing.assert_close(output.logits[name], sequences.logits[name][:, step])
        torch.testing.assert_close(output.values, sequences.values[:, step])
        assert output.hidden is not None
    policy_inputs = network.input_layer(states).tanh().chunk(2, -1)[0]
    expected = network.heads["action0"](network.policy_layer(policy_inputs).tanh())
    torch.testing.assert_close(sequences.logits["action0"], expected)
    assert not network.skip_heads


def test_impossible_sizes_raise() -> None:
    with pytest.raises(AgreementError, match="layers from 0"):
        make_network(layers=-1)
    with pytest.raises(AgreementError, match="LSTM from 2"):
        make_network(hidden_dim=1)
