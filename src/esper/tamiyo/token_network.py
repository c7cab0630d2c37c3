"""One policy for any host: a network over tokens that serves any number of slots and blueprints.

Every kind of token has an embedding; then tokens hear of each other, remember, and hear of each
other again. All tokens of a kind share their weights, so the order of slots and blueprints does not
matter and their number is free. Heads point at tokens: the op is read off the global one, the slot
off the slots', given the op, blueprint and blend off the candidates', given the slot.

Logits are those of the rule's advice, which is part of what is seen, plus a correction that starts
at zero: without training the likeliest action is what the rule would do. How much the advice counts
is learned too, for each op and each blend.

Shapes: `...` any batch shape, `N` rows or sequences, `T` time, `S` slots, `P` blueprints, `M`
tokens in all, `W` width of a token, `D` of its memory.
"""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from esper.leyline import Blend, LifecycleOp
from esper.leyline.errors import require_known
from esper.tamiyo.choosing import Logits
from esper.tamiyo.network import VALUE_GAIN, Hidden, Outlook, RecurrentActorCritic, RunningNorm, mlp
from esper.tamiyo.token_layout import ADVISED, WIDTHS, TokenLayout

WIDTH, MEMORY = 64, 32
ADVICE = 4.0  # logits that advised actions are ahead by: about nine times of ten they are drawn
ROOMS = tuple(TokenLayout(*room) for room in ((2, 4), (3, 3), (3, 5), (6, 4)))  # most need no more

Tokens = Sequence[Tensor]  # [..., W], [..., S, W], [..., S, P, W]


class TokenActorCritic(RecurrentActorCritic):
    """What a `TokenLayout` sees -> tokens -> pointer heads and a value; see above."""

    layout: TokenLayout
    lstm_layers = 1

    def __init__(self, layout: TokenLayout | None = None) -> None:
        super().__init__()
        self._lay_out(layout or TokenLayout())
        self.observation_norm = RunningNorm(0)  # tokens' numbers are in units of their own
        self.embeddings = nn.ModuleList(
            nn.Sequential(nn.Linear(size, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()) for size in WIDTHS
        )
        self.first, self.second = Exchange(WIDTH), Exchange(WIDTH)
        self.lstm = TokenLSTM(WIDTH, MEMORY)
        self.recalled = nn.Linear(MEMORY, WIDTH)
        ops, blends = len(LifecycleOp), len(Blend)
        self.heads = nn.ModuleList(mlp(WIDTH, size) for size in (ops, ops, 1, blends))
        self.value_head = mlp(WIDTH, 1)
        trusted = {"op": ops, "slot": ops, "seed": blends}  # logits that advised actions are given
        self.trust = nn.ParameterDict({name: torch.full((size,), ADVICE)
                                       for name, size in trusted.items()})  # fmt: skip
        self.draw_weights(policy_gain=0.0, value_gain=VALUE_GAIN)

    def _lay_out(self, layout: TokenLayout) -> None:
        self.layout, self.space, self.state_dim = layout, layout.space, layout.state_dim
        self.lstm_hidden_dim = layout.tokens * MEMORY

    def laid_out(self, layout: TokenLayout) -> "TokenActorCritic":
        """The same weights, not a copy of them, for rows with other room."""
        other = copy.copy(self)
        other._lay_out(layout)
        return other

    def in_rooms(self, states: Tensor) -> Iterator[tuple[Tensor, "TokenActorCritic", Tensor]]:
        """Of `states` [N, F] or [N, T, F] the rows [K] that a smaller room holds, or else this one;
        the network for it; and what they see there. A GPU does better with all of them at once."""
        _, own, seeds = self.layout.split(states if states.ndim == 3 else states[:, None])
        slots = (own[..., 0] > 0).any(1).sum(1)
        kinds = (seeds[..., 0] > 0).any(1).any(1).sum(1)
        left = torch.ones_like(slots, dtype=torch.bool)
        most = (self.layout.slots, self.layout.blueprints)
        fitting = [each for each in ROOMS if each.slots <= most[0] and each.blueprints <= most[1]]
        for room in (*fitting * (not states.is_cuda), self.layout):
            fits = left & (slots <= room.slots) & (kinds <= room.blueprints)
            left, rows = left & ~fits, fits.nonzero()[:, 0]
            if len(rows) or (room is self.layout and not len(states)):  # of no rows: nothing
                whole, own, seeds = self.layout.split(states[rows])
                own, seeds = self.layout.resized(room, own, seeds)
                seen = torch.cat((whole, own.flatten(-2), seeds.flatten(-3)), -1)
                yield rows, self.laid_out(room), seen

    def widened(self, logits: Logits, layout: TokenLayout) -> Logits:
        """This network's logits with the room of a larger layout, zeros where there was none."""
        op, slot, kind, blend = logits
        slots = slot.transpose(-1, -2)
        own, seeds = self.layout.resized(layout, slots, blend)
        _, kind = self.layout.resized(layout, slots, kind[..., None])
        return op, own.transpose(-1, -2), kind[..., 0], seeds

    def forward(
        self, states: Tensor, hidden: Hidden | None = None, starts: Tensor | None = None
    ) -> Outlook:
        """As that of any such network; on a CPU each row is computed in the least room for it."""
        fits = states.ndim in (2, 3) and states.shape[-1] == self.state_dim
        if not fits or self.layout in ROOMS or states.is_cuda or torch.compiler.is_compiling():
            return super().forward(states, hidden, starts)
        order, found, memories = list[Tensor](), list[Sequence[Tensor]](), list[list[Tensor]]()
        for rows, small, seen in self.in_rooms(states):
            h, c = hidden or self.get_initial_hidden(len(states), states.device, states.dtype)
            own = self._memory(h[:, rows], small.layout), self._memory(c[:, rows], small.layout)
            begins = None if starts is None else starts[rows]
            outlook = RecurrentActorCritic.forward(small, seen, own, begins)
            order.append(rows)
            found.append((*small.widened(outlook.logits, self.layout), outlook.values))
            memories.append([small._memory(part, self.layout) for part in outlook.hidden or ()])
        back = torch.cat(order).argsort()
        *tables, values = (torch.cat(each)[back] for each in zip(*found, strict=True))
        kept = [torch.cat(each, 1)[:, back] for each in zip(*memories, strict=True)]
        return Outlook(tuple(tables), values, (kept[0], kept[1]) if kept else None)

    def _memory(self, memory: Tensor, layout: TokenLayout) -> Tensor:
        """[1, N, M * D] of tokens of this layout as those of another; new ones have none."""
        sizes = (1, self.layout.slots, self.layout.slots * self.layout.blueprints)
        whole, own, seeds = memory.unflatten(-1, (-1, MEMORY)).split(sizes, -2)
        seeds = seeds.unflatten(-2, (self.layout.slots, -1))
        own, seeds = self.layout.resized(layout, own, seeds)
        return torch.cat((whole, own, seeds.flatten(-3, -2)), -2).flatten(-2)

    def prefer(self, head: str, action: int, by: float) -> None:
        require_known("head whose actions have meanings of their own", head, ("op", "blend"))
        super().prefer(head, action, by)

    def sense(self, states: Tensor) -> Tensor:
        """[..., M * W]"""
        seen = self.layout.split(states)
        embedded = [embed(token) for embed, token in zip(self.embeddings, seen, strict=True)]
        whole, own, seeds = self.first(embedded, *_present(seen))
        return torch.cat((whole, own.flatten(-2), seeds.flatten(-3)), -1)

    def conclude(self, memory: Tensor, sensed: Tensor, states: Tensor) -> tuple[Logits, Tensor]:
        seen = self.layout.split(states)
        tokens = sensed.unflatten(-1, (-1, WIDTH))
        tokens = tokens + self.recalled(memory.unflatten(-1, (-1, MEMORY)))
        sizes = (1, self.layout.slots, self.layout.slots * self.layout.blueprints)
        parts = tokens.split(sizes, -2)
        apart = (parts[0][..., 0, :], parts[1], parts[2].unflatten(-2, (self.layout.slots, -1)))
        whole, own, seeds = self.second(apart, *_present(seen))
        op, slot, seed = (token[..., -size:] for token, size in zip(seen, ADVISED, strict=True))
        advised_slot = (self.trust["slot"] * op)[..., :, None] * slot[..., None, :, 0]
        seed = self.trust["seed"] * seed
        logits = (
            self.heads[0](whole) + self.trust["op"] * op,
            self.heads[1](own).transpose(-1, -2) + advised_slot,  # [..., ops, S]
            self.heads[2](seeds)[..., 0] + seed.sum(-1),
            self.heads[3](seeds) + seed,
        )
        return logits, self.value_head(whole)[..., 0]


class Exchange(nn.Module):
    """Tokens hear of each other: candidates of their slot and of their blueprint elsewhere, slots
    of their candidates, the global one of all slots, and all of the global one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.seeds, self.own, self.whole = Heard(width, 4), Heard(width, 4), Heard(width, 3)

    def forward(self, tokens: Tokens, slots: Tensor, kinds: Tensor) -> Tokens:
        """`slots` [..., S, 1] and `kinds` [..., S, P, 1]: 1, or 0 for padding."""
        whole, own, seeds = tokens
        alike = _mean(seeds, kinds, -3)[..., None, :, :]  # [..., 1, P, W]
        everyone = whole[..., None, :]
        seeds = self.seeds(seeds, own[..., None, :], everyone[..., None, :], alike)
        own = self.own(own, _mean(seeds, kinds, -2), _most(seeds, kinds, -2), everyone)
        return self.whole(whole, _mean(own, slots, -2), _most(own, slots, -2)), own, seeds


class Heard(nn.Module):
    """A token and what it hears of others, each through a layer of its own."""

    def __init__(self, width: int, sources: int) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(width, width) for _ in range(sources))
        self.norm = nn.LayerNorm(width)

    def forward(self, token: Tensor, *others: Tensor) -> Tensor:
        heard = self.ways[0](token)
        for way, other in zip(self.ways[1:], others, strict=True):
            heard = heard + way(other)  # before they are spread out: fewer are computed
        return token + relu(self.norm(heard))


class TokenLSTM(nn.Module):
    """One LSTM for all tokens, which stand side by side in its inputs and its memory."""

    def __init__(self, width: int, memory: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(width, memory, batch_first=True)

    def forward(self, inputs: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """[N, T, M * D] and the memory after it, for inputs [N, T, M * W] and [1, N, M * D]."""
        cells, rows = self.cells, len(inputs)
        each = inputs.unflatten(-1, (-1, cells.input_size)).transpose(1, 2).flatten(0, 1)
        h, c = (part.unflatten(-1, (-1, cells.hidden_size)).flatten(1, 2) for part in hidden)
        outputs, after = cells(each, (h, c))
        h, c = (part.unflatten(1, (rows, -1)).flatten(2) for part in after)
        return outputs.unflatten(0, (rows, -1)).transpose(1, 2).flatten(2), (h, c)


def _present(seen: Tokens) -> tuple[Tensor, Tensor]:
    """Slots [..., S, 1] and candidates [..., S, P, 1]: 1, or 0 for padding. Products with these are
    several times faster on a CPU than filling in."""
    own, seeds = ((each[..., :1] > 0).to(each.dtype) for each in seen[1:])
    return own, seeds


def _mean(tokens: Tensor, present: Tensor, axis: int) -> Tensor:
    return (tokens * present).sum(axis) / present.sum(axis).clamp(min=1)


def _most(tokens: Tensor, present: Tensor, axis: int) -> Tensor:
    far = torch.finfo(tokens.dtype).max / 2
    return (tokens + (present - 1) * far).amax(axis) * present.amax(axis)
