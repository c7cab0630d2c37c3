"""A variant of Tamiyo's network with skip connections around the LSTM.

`esper.rl` uses it for environments in which a single observation often decides. The policy reads
the current observation beside the memory, and not through it. What is learned about one observation
then hardly changes the choice for another.

    state ── observation_norm ─┬────────────────────► lstm ──► heads[name] ───────┐
                               ├── policy features ──────────► skip_heads[name] ──┴─► logits
                               └── value features ──► (+ memory, detached) ─────────► value_head
"""

import torch
from torch import Tensor, nn

from esper.leyline import ActionSpace, AgreementError, constants
from esper.tamiyo.distributions import Logits
from esper.tamiyo.normalization import RunningNorm
from esper.tamiyo.recurrent import HIDDEN_GAIN, POLICY_GAIN, RecurrentActorCritic, forget_gate_bias
from esper.tamiyo.sequences import Hidden

LONG_MEMORY_BIAS = 4.0  # forget gates keep 98 % of the memory in a step


class SkipActorCritic(RecurrentActorCritic):
    """LSTM heads plus skip heads on the current observation; tanh instead of LayerNorm and ReLU.

    Without LSTM layers there is no memory, and the skip heads alone are the policy. The value head
    does not train the LSTM: values that nothing can predict would disturb the memory.
    """

    def __init__(
        self,
        action_space: ActionSpace,
        *,
        state_dim: int,
        lstm_hidden_dim: int = constants.DEFAULT_LSTM_HIDDEN_DIM,
        lstm_layers: int = constants.DEFAULT_LSTM_LAYERS,
    ) -> None:
        """Create the network with initial weights from torch's global random generator.

        Args:
            action_space: Names and sizes of the action heads.
            state_dim: Length `F` of the observation vector.
            lstm_hidden_dim: Hidden size `D` of the LSTM and width of the feature layers.
            lstm_layers: Number of LSTM layers; 0 for a policy without memory.
        """
        super().__init__()
        if state_dim < 1 or lstm_layers < 0 or lstm_hidden_dim < 2:
            given = f"state {state_dim}, LSTM {lstm_hidden_dim} x {lstm_layers} layers"
            valid = "state from 1, LSTM from 2, layers from 0"
            raise AgreementError("The network's sizes are too small", given=given, valid=valid)
        self.action_space = action_space
        self.state_dim = state_dim
        self.lstm_hidden_dim = lstm_hidden_dim
        self.lstm_layers = lstm_layers
        sizes = dict(zip(action_space.names, action_space.sizes, strict=True))
        width = lstm_hidden_dim

        self.observation_norm = RunningNorm(state_dim)
        # The first layers of policy and value features, in one matrix product.
        self.input_layer = nn.Linear(state_dim, 2 * width)
        self.policy_layer = nn.Linear(width, width)
        self.value_head = _tanh_head(width, 1, hidden_layers=1)
        skip_heads = {name: nn.Sequential(nn.Linear(width, size)) for name, size in sizes.items()}
        if lstm_layers:
            self.lstm = nn.LSTM(state_dim, width, lstm_layers, batch_first=True)
            self.heads = nn.ModuleDict(
                {name: _tanh_head(width, size, hidden_layers=2) for name, size in sizes.items()}
            )
            self.skip_heads = nn.ModuleDict(skip_heads)
        else:
            self.lstm = nn.Identity()
            self.heads = nn.ModuleDict(skip_heads)
            self.skip_heads = nn.ModuleDict()

        # Rewards may be tiny, so that initial values other than 0 would dominate the returns.
        self._init_weights(value_gain=0.0)
        for skip_head in self.skip_heads.values():
            nn.init.orthogonal_(skip_head[0].weight, POLICY_GAIN)  # type: ignore[index]
        for weight in self.input_layer.weight.chunk(2):
            nn.init.orthogonal_(weight, HIDDEN_GAIN)
        if isinstance(self.lstm, nn.LSTM):
            self.lstm.reset_parameters()  # forgets by default: recent observations come first

    def encode(self, states: Tensor) -> Tensor:
        """Return the normalised states, which are the inputs of the LSTM."""
        normalised: Tensor = self.observation_norm(states)
        return normalised

    def decode(self, memory: Tensor, encoded: Tensor, states: Tensor) -> tuple[Logits, Tensor]:
        """Return logits by head, and values [...] in units of the return scale."""
        policy_inputs, value_features = self.input_layer(encoded).tanh().chunk(2, -1)
        policy_features = self.policy_layer(policy_inputs).tanh()
        if not self.lstm_layers:
            logits = {name: head(policy_features) for name, head in self.heads.items()}
            return logits, self.value_head(value_features).squeeze(-1)
        logits = {
            name: head(memory) + self.skip_heads[name](policy_features)
            for name, head in self.heads.items()
        }
        values = self.value_head(value_features + memory.detach())
        return logits, values.squeeze(-1)

    def _run_step(
        self, inputs: Tensor, hidden: Hidden, starts: Tensor | None
    ) -> tuple[Tensor, Hidden]:
        if not self.lstm_layers:
            return inputs, hidden
        return super()._run_step(inputs, hidden, starts)

    def _run_sequences(self, inputs: Tensor, hidden: Hidden, starts: Tensor | None) -> Tensor:
        if not self.lstm_layers:
            return inputs
        return super()._run_sequences(inputs, hidden, starts)

    @torch.no_grad()
    def init_long_memory(self) -> None:
        """Let half of the memory keep its contents for about fifty steps.

        The forget gates get a large bias (chrono initialisation, Tallec & Ollivier 2018).
        """
        for name, parameter in self.lstm.named_parameters():
            if "bias_ih" in name:
                forget_gate_bias(parameter)[self.lstm_hidden_dim // 2 :] += LONG_MEMORY_BIAS


def _tanh_head(inputs: int, outputs: int, *, hidden_layers: int) -> nn.Sequential:
    """Return a head with tanh layers of half the input size."""
    width = inputs // 2
    layers: list[nn.Module] = [nn.Linear(inputs, width), nn.Tanh()]
    for _ in range(hidden_layers - 1):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))
