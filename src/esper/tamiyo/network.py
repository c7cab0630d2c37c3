"""Tamiyo's network for hosts with fixed slots and blueprints.

    state [N, F]
      │  observation_norm        running mean and variance
      ▼
    feature_net                  Linear, LayerNorm, ReLU
      ▼
    lstm  ◄── hidden (h, c)      reset to zero where an episode begins
      ▼
    lstm_ln                      LayerNorm
      ├──► heads["op"]           Linear, ReLU, Linear → logits of the op
      ├──► heads["slot"]         … of the slot
      ├──► heads["blueprint"]    … of the blueprint
      ├──► heads["blend"]        … of the blend
      └──► value_head            … value, in units of the return scale

There is one head for each action head of the action space, whatever their number.
"""

import torch
from torch import Tensor, nn

from esper.leyline import ActionSpace, AgreementError, constants
from esper.tamiyo.distributions import Logits
from esper.tamiyo.normalization import RunningNorm
from esper.tamiyo.recurrent import RecurrentActorCritic, mlp_head


class FactoredRecurrentActorCritic(RecurrentActorCritic):
    """Feature net, LSTM, one policy head for each action head, and a value head."""

    feature_mask: Tensor  # [F] 1, or 0 for features that the network must not see (ablations)

    def __init__(
        self,
        action_space: ActionSpace,
        *,
        state_dim: int,
        feature_dim: int | None = None,
        lstm_hidden_dim: int = constants.DEFAULT_LSTM_HIDDEN_DIM,
        lstm_layers: int = constants.DEFAULT_LSTM_LAYERS,
    ) -> None:
        """Create the network with initial weights from torch's global random generator.

        Args:
            action_space: Names and sizes of the action heads.
            state_dim: Length `F` of the observation vector.
            feature_dim: Output size of the feature net; by default the LSTM's hidden size.
            lstm_hidden_dim: Hidden size `D` of the LSTM.
            lstm_layers: Number of LSTM layers.
        """
        super().__init__()
        if min(state_dim, lstm_layers) < 1 or lstm_hidden_dim < 2:
            given = f"state {state_dim}, LSTM {lstm_hidden_dim} x {lstm_layers} layers"
            valid = "state from 1, LSTM from 2, layers from 1"
            raise AgreementError("The network's sizes are too small", given=given, valid=valid)
        self.action_space = action_space
        self.state_dim = state_dim
        self.lstm_hidden_dim = lstm_hidden_dim
        self.lstm_layers = lstm_layers
        feature_dim = feature_dim or lstm_hidden_dim

        self.observation_norm = RunningNorm(state_dim)
        self.register_buffer("feature_mask", torch.ones(state_dim))
        self.feature_net = nn.Sequential(
            nn.Linear(state_dim, feature_dim), nn.LayerNorm(feature_dim), nn.ReLU()
        )
        self.lstm = nn.LSTM(feature_dim, lstm_hidden_dim, lstm_layers, batch_first=True)
        self.lstm_ln = nn.LayerNorm(lstm_hidden_dim)
        self.heads = nn.ModuleDict(
            {
                name: mlp_head(lstm_hidden_dim, size)
                for name, size in zip(action_space.names, action_space.sizes, strict=True)
            }
        )
        self.value_head = mlp_head(lstm_hidden_dim, 1)
        self._init_weights()

    def encode(self, states: Tensor) -> Tensor:
        """Return features [..., D] of states [..., F]."""
        normalised: Tensor = self.observation_norm(states) * self.feature_mask.to(states.dtype)
        features: Tensor = self.feature_net(normalised)
        return features

    def decode(self, memory: Tensor, encoded: Tensor, states: Tensor) -> tuple[Logits, Tensor]:
        """Return logits by head, and values [...] in units of the return scale."""
        memory = self.lstm_ln(memory)
        logits = {name: head(memory) for name, head in self.heads.items()}
        return logits, self.value_head(memory).squeeze(-1)
