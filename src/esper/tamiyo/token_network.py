"""Tamiyo's network for any host: it reads tokens and serves any number of slots and blueprints.

There is one token for the whole host (global), one for each slot, and one for each *candidate*,
which is a slot with a blueprint. All tokens of a kind share their weights, so the order and the
number of slots and blueprints do not matter.

    tokens ── embeddings ──► mixing_before ──► lstm (per token) ──► memory_proj ──► mixing_after
                                   └──────────────────────────────────── + ──────────────┘
    global token ──► op, value      slot tokens ──► slot      candidate tokens ──► blueprint, blend

The rule `audition` proposes an action, which is part of the tokens. The logits are those of this
proposal plus a correction that is zero at first: an untrained network acts most likely as the rule.
`rule_logit_scale`, the logit of a proposed action, is learned for each op and each blend.

Shapes: `...` any batch shape, `N` rows or sequences, `T` time, `S` slots, `P` blueprints, `M` all
tokens, `W` width of a token, `D` hidden size of a token.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from esper.leyline import HEAD_NAMES, Blend, LifecycleOp
from esper.leyline.errors import require_known
from esper.tamiyo.distributions import Logits
from esper.tamiyo.normalization import RunningNorm
from esper.tamiyo.recurrent import VALUE_GAIN, RecurrentActorCritic, mlp_head
from esper.tamiyo.sequences import Hidden
from esper.tamiyo.token_layout import ADVISED, WIDTHS, TokenLayout

TOKEN_WIDTH = 64
TOKEN_HIDDEN_DIM = 32
INITIAL_RULE_LOGIT = 4.0  # the proposed action is then sampled about nine times of ten

Tokens = Sequence[Tensor]  # global [..., W], slots [..., S, W], candidates [..., S, P, W]


class TokenActorCritic(RecurrentActorCritic):
    """Embeds the tokens of a `TokenLayout`, mixes them, and points at slots and candidates."""

    layout: TokenLayout
    lstm_layers = 1

    def __init__(self, layout: TokenLayout | None = None) -> None:
        """Create the network with initial weights from torch's global random generator.

        Args:
            layout: Number of slots and blueprints of the padded tokens. The weights do not
                depend on it.
        """
        super().__init__()
        self._set_layout(layout or TokenLayout())
        num_ops, num_blends = len(LifecycleOp), len(Blend)
        self.observation_norm = RunningNorm(0)  # token features have fixed scales
        self.embeddings = nn.ModuleList(
            nn.Sequential(nn.Linear(size, TOKEN_WIDTH), nn.LayerNorm(TOKEN_WIDTH), nn.ReLU())
            for size in WIDTHS
        )
        self.mixing_before = TokenMixing(TOKEN_WIDTH)
        self.lstm = TokenLSTM(TOKEN_WIDTH, TOKEN_HIDDEN_DIM)
        self.memory_proj = nn.Linear(TOKEN_HIDDEN_DIM, TOKEN_WIDTH)
        self.mixing_after = TokenMixing(TOKEN_WIDTH)
        outputs = {"op": num_ops, "slot": num_ops, "blueprint": 1, "blend": num_blends}
        self.heads = nn.ModuleDict(
            {name: mlp_head(TOKEN_WIDTH, outputs[name]) for name in HEAD_NAMES}
        )
        self.value_head = mlp_head(TOKEN_WIDTH, 1)
        scale_sizes = {"op": num_ops, "slot": num_ops, "seed": num_blends}
        self.rule_logit_scale = nn.ParameterDict(
            {name: torch.full((size,), INITIAL_RULE_LOGIT) for name, size in scale_sizes.items()}
        )
        self._init_weights(policy_gain=0.0, value_gain=VALUE_GAIN)

    def _set_layout(self, layout: TokenLayout) -> None:
        self.layout = layout
        self.action_space = layout.space
        self.state_dim = layout.state_dim
        self.lstm_hidden_dim = layout.tokens * TOKEN_HIDDEN_DIM

    def with_layout(self, layout: TokenLayout) -> "TokenActorCritic":
        """Return a network for another layout that shares the weights of this one."""
        network = copy.copy(self)
        network._set_layout(layout)
        return network

    def bias_action_logit(self, head: str, action: int, amount: float) -> None:
        """Add `amount` to the logit bias of an op or a blend, to change the initial policy."""
        require_known("head whose actions have a bias", head, ("op", "blend"))
        super().bias_action_logit(head, action, amount)

    def encode(self, states: Tensor) -> Tensor:
        """Return mixed tokens [..., M * W] of states [..., F]."""
        features = self.layout.split(states)
        embedded = [
            embedding(token) for embedding, token in zip(self.embeddings, features, strict=True)
        ]
        global_token, slots, candidates = self.mixing_before(embedded, *_presence(features))
        return torch.cat((global_token, slots.flatten(-2), candidates.flatten(-3)), -1)

    def decode(self, memory: Tensor, encoded: Tensor, states: Tensor) -> tuple[Logits, Tensor]:
        """Return logits by head, and values [...] in units of the return scale.

        The logits of `slot` are a table over ops, those of `blueprint` over slots, and those of
        `blend` over slots and blueprints.
        """
        # Add the memory of each token, then mix the tokens again.
        features = self.layout.split(states)
        tokens = encoded.unflatten(-1, (-1, TOKEN_WIDTH))
        tokens = tokens + self.memory_proj(memory.unflatten(-1, (-1, TOKEN_HIDDEN_DIM)))
        num_slots = self.layout.slots
        num_candidates = num_slots * self.layout.blueprints
        global_token, slots, candidates = tokens.split((1, num_slots, num_candidates), -2)
        global_token, slots, candidates = self.mixing_after(
            (global_token[..., 0, :], slots, candidates.unflatten(-2, (num_slots, -1))),
            *_presence(features),
        )

        # The action that the rule proposes, one-hot, is at the end of each token's features.
        proposed_op, proposed_slot, proposed_seed = (
            token[..., -size:] for token, size in zip(features, ADVISED, strict=True)
        )
        op_logits = self.rule_logit_scale["op"] * proposed_op
        slot_scale = self.rule_logit_scale["slot"] * proposed_op  # [..., ops]
        slot_logits = slot_scale[..., :, None] * proposed_slot[..., None, :, 0]  # [..., ops, S]
        seed_logits = self.rule_logit_scale["seed"] * proposed_seed  # [..., S, P, blends]

        logits = {
            "op": op_logits + self.heads["op"](global_token),
            "slot": slot_logits + self.heads["slot"](slots).transpose(-1, -2),
            "blueprint": seed_logits.sum(-1) + self.heads["blueprint"](candidates)[..., 0],
            "blend": seed_logits + self.heads["blend"](candidates),
        }
        return logits, self.value_head(global_token)[..., 0]


class TokenMixing(nn.Module):
    """Exchanges information between tokens, with a residual connection.

    A candidate receives its slot, the global token, and the mean of the candidates with the same
    blueprint. A slot receives mean and maximum of its candidates and the global token. The global
    token receives mean and maximum of the slots.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.candidates = Aggregate(width, sources=4)
        self.slots = Aggregate(width, sources=4)
        self.global_token = Aggregate(width, sources=3)

    def forward(self, tokens: Tokens, has_slot: Tensor, has_candidate: Tensor) -> Tokens:
        """Return the mixed tokens.

        Args:
            tokens: Global, slot and candidate tokens.
            has_slot: 1, or 0 for padding, [..., S, 1].
            has_candidate: 1, or 0 for padding, [..., S, P, 1].
        """
        global_token, slots, candidates = tokens
        same_blueprint = _masked_mean(candidates, has_candidate, -3)[..., None, :, :]
        everywhere = global_token[..., None, :]
        candidates = self.candidates(
            candidates, slots[..., None, :], everywhere[..., None, :], same_blueprint
        )
        slots = self.slots(
            slots,
            _masked_mean(candidates, has_candidate, -2),
            _masked_max(candidates, has_candidate, -2),
            everywhere,
        )
        global_token = self.global_token(
            global_token, _masked_mean(slots, has_slot, -2), _masked_max(slots, has_slot, -2)
        )
        return global_token, slots, candidates


class Aggregate(nn.Module):
    """Adds up projections of a token and of other tokens, then norm, ReLU and a residual."""

    def __init__(self, width: int, sources: int) -> None:
        super().__init__()
        self.sources = nn.ModuleList(nn.Linear(width, width) for _ in range(sources))
        self.norm = nn.LayerNorm(width)

    def forward(self, token: Tensor, *others: Tensor) -> Tensor:
        total = self.sources[0](token)
        for layer, tensor in zip(self.sources[1:], others, strict=True):
            total = total + layer(tensor)  # projected before it is broadcast: less to compute
        return token + relu(self.norm(total))


class TokenLSTM(nn.Module):
    """One LSTM for all tokens, which are concatenated in its inputs and its hidden state."""

    def __init__(self, width: int, hidden_dim: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(width, hidden_dim, batch_first=True)

    def forward(self, inputs: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """Return outputs and the hidden state after the last step.

        Args:
            inputs: Tokens, [N, T, M * W].
            hidden: Hidden state, [1, N, M * D] each.

        Returns:
            Outputs [N, T, M * D], and the hidden state [1, N, M * D] each.
        """
        rows = len(inputs)
        per_token = inputs.unflatten(-1, (-1, self.cells.input_size)).transpose(1, 2).flatten(0, 1)
        h, c = (part.unflatten(-1, (-1, self.cells.hidden_size)).flatten(1, 2) for part in hidden)
        outputs, hidden_after = self.cells(per_token, (h, c))
        h, c = (part.unflatten(1, (rows, -1)).flatten(2) for part in hidden_after)
        return outputs.unflatten(0, (rows, -1)).transpose(1, 2).flatten(2), (h, c)


def _presence(features: Tokens) -> tuple[Tensor, Tensor]:
    """Return which slots [..., S, 1] and candidates [..., S, P, 1] exist: 1, or 0 for padding.

    Products with these are several times faster on a CPU than `masked_fill`.
    """
    _, slots, candidates = features
    has_slot = (slots[..., :1] > 0).to(slots.dtype)
    has_candidate = (candidates[..., :1] > 0).to(candidates.dtype)
    return has_slot, has_candidate


def _masked_mean(tokens: Tensor, presence: Tensor, dim: int) -> Tensor:
    return (tokens * presence).sum(dim) / presence.sum(dim).clamp(min=1)


def _masked_max(tokens: Tensor, presence: Tensor, dim: int) -> Tensor:
    """Return the maximum over the existing tokens; 0 if there is none."""
    lowest = torch.finfo(tokens.dtype).max / 2
    return (tokens + (presence - 1) * lowest).amax(dim) * presence.amax(dim)
