"""Tamiyo's network: features, memory, one policy head for each action head, and a value.

Shapes: `N` rows or sequences, `T` time, `F` state features, `L` layers, `D` hidden size, `H` heads,
`A` actions of the largest head, `K` pieces of sequences between episode starts.
"""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from esper.leyline import ActionSpace, AgreementError, Legality, constants, require_agreement
from esper.leyline.slots import require_form
from esper.tamiyo.choosing import Among, Choice, Logits, MaskedCategorical, choose, logits_given

INNER_GAIN = math.sqrt(2.0)
POLICY_GAIN = 0.01  # nearly uniform at first
VALUE_GAIN = 1.0
FORGET_BIAS = 1.0  # remember by default
REMEMBER_BIAS = 4.0  # what is left after a step: 0.98

CLIP = 10.0  # standard deviations; an outlier must not drown the other features
EPSILON = 1e-8
MARKS_ROUNDING = 1e-9  # of mean squares
RARE, COMMON = 0.4, 0.6  # shares of ones up to which a mark is taken for one, and stays one
# Of features that are made to span about 1: what hardly ever changed while learning must not be
# blown up where it differs, as costs do on another host.
GARDEN_FLOOR = 1e-2

# How much longer than a piece the longest beside it may be. Measured with 442 pieces of up to 130
# steps: with 2 it took 1.2 times as long as sequences without cuts, in one group of all 6.7 times,
# as a packed sequence 3.5 times.
MAX_PADDING = 2.0
KEPT_STEPS = 4096  # up to so many, where sequences were cut is remembered
WORTH_A_CALL = 160  # steps of padding that cost as much as one more call of the LSTM

Hidden = tuple[Tensor, Tensor]  # the LSTM's h and c, [L, N, D] each
Pieces = tuple[list[tuple[Tensor, ...]], Tensor]
Units = tuple[Tensor, Tensor, Tensor]
Summed = Callable[[Tensor], Tensor]  # adds a tensor up over the processes that learn together


def alone(tensor: Tensor) -> Tensor:
    """The sum over the processes where there is only one."""
    return tensor


class Outlook(NamedTuple):
    """What the network makes of states."""

    logits: Logits  # [N, H, A] or [N, T, H, A]; padding has the mask value
    values: Tensor  # [N] or [N, T], in units of the return
    hidden: Hidden | None  # after a single step; sequences are not gone on from


class Evaluation(NamedTuple):
    """Decisions that were taken, seen with the present weights; carries gradient."""

    log_probs: Tensor  # [N, T, H]
    entropies: Tensor  # [N, T, H], 0 to 1
    values: Tensor  # [N, T], in units of the return


class RecurrentActorCritic(nn.Module, ABC):
    """Observations -> memory -> logits of every head and a value: all that an agent relies on.

    The value head works in units of `return_scale`, which follows the size of the returns.
    """

    space: ActionSpace
    state_dim: int
    lstm_hidden_dim: int
    lstm_layers: int
    observation_norm: "RunningNorm"
    lstm: nn.Module  # takes inputs [N, T, D] and a memory as `nn.LSTM` does
    heads: nn.ModuleList  # of the action space; what else there is belongs to all of them
    value_head: nn.Sequential
    return_scale: Tensor
    return_moment: Tensor  # decaying sums of squared returns, and of their weights
    return_weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("return_scale", torch.ones(()))
        self.register_buffer("return_moment", torch.zeros((), dtype=torch.float64))
        self.register_buffer("return_weight", torch.zeros((), dtype=torch.float64))

    @abstractmethod
    def sense(self, states: Tensor) -> Tensor:
        """[..., D]: what memory is given of states [..., F]."""

    @abstractmethod
    def conclude(self, memory: Tensor, sensed: Tensor, states: Tensor) -> tuple[Logits, Tensor]:
        """Logits, and values [...] in units of the return scale."""

    def draw_weights(self, policy_gain: float, value_gain: float) -> None:
        """Orthogonal ones; the gains are those of the last layers."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, INNER_GAIN)
                nn.init.zeros_(module.bias)
        for head in self.heads:
            nn.init.orthogonal_(head[-1].weight, policy_gain)  # type: ignore[index]
        nn.init.orthogonal_(self.value_head[-1].weight, value_gain)  # type: ignore[arg-type]
        for name, parameter in self.lstm.named_parameters():
            if "weight" in name:
                nn.init.orthogonal_(parameter)
            else:  # the gates stand in the order input, forget, cell, output
                nn.init.zeros_(parameter)
                if "bias_ih" in name:
                    nn.init.constant_(parameter.chunk(4)[1], FORGET_BIAS)

    @torch.no_grad()
    def prefer(self, head: str, action: int, by: float) -> None:
        """Make an untrained network likelier to take this action, by a difference of logits."""
        self.heads[self.space.index(head)][-1].bias[action] += by  # type: ignore[index]

    @torch.no_grad()
    def remember(self) -> None:
        """Let half of an untrained memory keep what it takes in for some fifty steps."""
        for name, parameter in self.lstm.named_parameters():
            if "bias_ih" in name:  # the second of the gates is the one that forgets
                parameter.chunk(4)[1][self.lstm_hidden_dim // 2 :] += REMEMBER_BIAS

    def get_initial_hidden(
        self, rows: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Hidden:
        """An empty memory for that many rows; by default where and as the weights are."""
        like = next(self.parameters())
        shape = (self.lstm_layers, rows, self.lstm_hidden_dim)
        h = torch.zeros(shape, device=device or like.device, dtype=dtype or like.dtype)
        return h, torch.zeros_like(h)

    def forward(
        self, states: Tensor, hidden: Hidden | None = None, starts: Tensor | None = None
    ) -> Outlook:
        """One step of states [N, F], or whole sequences [N, T, F].

        `starts` [N] or [N, T] marks the steps that begin an episode: the memory is empty there.
        Without `hidden` the memory is empty at first, on the device and in the type of `states`.
        """
        if states.ndim not in (2, 3) or states.shape[-1] != self.state_dim:
            given = list(states.shape)
            valid = f"[rows, {self.state_dim}] or [rows, time, {self.state_dim}]"
            raise AgreementError("States have the wrong shape", given=given, valid=valid)
        if hidden is None:
            hidden = self.get_initial_hidden(len(states), states.device, states.dtype)
        sensed = self.sense(states)
        after: Hidden | None = None
        if not self.lstm_layers:
            memory, after = sensed, hidden if states.ndim == 2 else None
        elif states.ndim == 2:
            entering = hidden if starts is None else reset_hidden(hidden, starts)
            memory, after = run_step(self.lstm, sensed, entering)
        else:
            memory = run_sequences(self.lstm, sensed, hidden, starts)
        logits, values = self.conclude(memory, sensed, states)
        return Outlook(logits, values.float() * self.return_scale, after)

    @torch.no_grad()
    def get_action(
        self,
        states: Tensor,
        legality: Legality,
        hidden: Hidden | None = None,
        starts: Tensor | None = None,
        *,
        greedy: bool = False,
        generator: torch.Generator | None = None,
        among: Among | None = None,
        validate: bool = True,
    ) -> tuple[Choice, Tensor, Hidden]:
        """Decide for states [N, F], **without gradient**; `evaluate_actions` has it.

        Returns the choice, the values [N] and the memory after the step. States `among` those of
        other processes get the chance that they would get if one process decided for all.
        """
        what = "States to decide on have the wrong shape, or not a row for each row of the masks"
        require_form(what, states, (legality.hosts, self.state_dim))
        require_agreement("action heads", ("network", self.space), ("masks", legality.space))
        logits, values, after = self(states, hidden, starts)
        choice = choose(
            logits, legality, greedy=greedy, generator=generator, among=among, validate=validate
        )
        return choice, values, after

    def evaluate_actions(
        self,
        states: Tensor,
        actions: Tensor,
        masks: Tensor,
        hidden: Hidden | None = None,
        starts: Tensor | None = None,
        *,
        validate: bool = False,
    ) -> Evaluation:
        """Log-probs, entropies and values of decisions, with gradient.

        `states` [N, T, F], `actions` [N, T, H] and resolved `masks` [N, T, H, A], or all of them
        without the time axis.
        """
        heads = (*states.shape[:-1], len(self.space))
        require_form("Actions must have a row for each state", actions, heads)
        every = (*heads, max(self.space.sizes))
        require_form("Masks must have a row for each state", masks, every)
        outlook = self(states, hidden, starts)
        logits = logits_given(outlook.logits, self.space, actions)
        chosen = MaskedCategorical(logits, masks, validate)
        return Evaluation(chosen.log_prob(actions), chosen.entropy(), outlook.values)

    @torch.no_grad()
    def observe_returns(self, returns: Tensor, valid: Tensor, summed: Summed = alone) -> None:
        """Let the value head work in units of the returns' running size (root mean square).

        Its last layer is scaled the other way, so the values it gives stay what they are.
        """
        squares = returns.double().masked_fill(~valid, 0.0).square().sum()
        total = summed(torch.stack((squares, valid.sum().double())))
        square = total[0] / total[1].clamp(min=1)
        news = 1 - constants.RETURN_SCALE_DECAY
        self.return_weight.lerp_(torch.ones_like(self.return_weight), news)
        self.return_moment.lerp_(square, news)
        size = (self.return_moment / self.return_weight).sqrt()
        scale = size.clamp(min=constants.MIN_RETURN_SCALE)
        ratio = self.return_scale / scale.to(self.return_scale)
        for parameter in self.value_head[-1].parameters():
            parameter.mul_(ratio)
        self.return_scale.copy_(scale)


class FactoredRecurrentActorCritic(RecurrentActorCritic):
    """Feature net -> LSTM -> one head for each head of the action space, and a value head.

    With `direct` the present speaks beside the memory, not through it, and tanh stands in place of
    layer norms and ReLU: what is learned of one state then hardly moves the choice in another. The
    memory sees what was observed itself, and forgets by default: so it learns first what was seen
    of late. It learns from the policy alone: a value that nothing could foretell is noise to it.
    Values read the memory beside features of the present that are their own. Without layers of an
    LSTM there is no memory, and the present speaks alone.
    """

    visible: Tensor  # [F] 1 or 0: features that count; the others might as well not be there

    def __init__(
        self,
        space: ActionSpace,
        state_dim: int,
        lstm_hidden_dim: int = constants.DEFAULT_LSTM_HIDDEN_DIM,
        lstm_layers: int = constants.DEFAULT_LSTM_LAYERS,
        *,
        direct: bool = False,
    ) -> None:
        super().__init__()
        if min(state_dim, lstm_layers + direct) < 1 or lstm_hidden_dim < 2:
            given = f"state {state_dim}, LSTM {lstm_hidden_dim} x {lstm_layers} layers"
            valid = "state from 1, LSTM from 2, layers from 1, or 0 where the present speaks"
            raise AgreementError("The network's sizes are too small", given=given, valid=valid)
        self.space, self.state_dim = space, state_dim
        self.lstm_hidden_dim, self.lstm_layers = lstm_hidden_dim, lstm_layers
        self.direct = direct
        self.observation_norm = RunningNorm(state_dim, keeps_marks=direct)
        D, nothing = lstm_hidden_dim, nn.Identity()
        # Where the present speaks, policy and value each have a half of the first layer.
        seeing, deep = nn.Linear(state_dim, D * (1 + direct)), (nn.LayerNorm(D), nn.ReLU())
        self.features = nn.Sequential(seeing, *((nn.Linear(D, D),) if direct else deep))
        sizes = (state_dim if direct else D, D, lstm_layers)
        self.lstm = nn.LSTM(*sizes, batch_first=True) if lstm_layers else nothing
        self.memory_norm = nothing if direct else nn.LayerNorm(D)
        heads = [mlp(D, size, 2 * direct) for size in space.sizes if lstm_layers]
        simple = [nn.Linear(D, size) for size in space.sizes if direct]
        self.heads = nn.ModuleList(heads or map(nn.Sequential, simple))
        self.value_head = mlp(D, 1, int(direct))
        self.presents = nn.ModuleList(simple if heads else [])
        self.register_buffer("visible", torch.ones(state_dim))
        # Rewards may be tiny, and a first guess drowns them.
        self.draw_weights(POLICY_GAIN, 0.0 if direct else VALUE_GAIN)
        for half in seeing.weight.chunk(2) if direct else ():
            nn.init.orthogonal_(half, INNER_GAIN)
        for present in simple:
            nn.init.orthogonal_(present.weight, POLICY_GAIN)
        if direct and isinstance(self.lstm, nn.LSTM):
            self.lstm.reset_parameters()

    def sense(self, states: Tensor) -> Tensor:
        seen: Tensor = self.observation_norm(states) * self.visible.to(states.dtype)
        return seen if self.direct else self.features(seen)

    def conclude(self, memory: Tensor, sensed: Tensor, states: Tensor) -> tuple[Logits, Tensor]:
        judged = memory = self.memory_norm(memory)
        if self.direct:
            shown = self.observation_norm.louder(sensed)
            seen, judged = self.features[0](shown).tanh().chunk(2, -1)
            seen = self.features[1](seen).tanh()
            memory, judged = (memory, judged + memory.detach()) if self.presents else (seen, judged)
        logits, widest = [head(memory) for head in self.heads], max(self.space.sizes)
        if self.presents:
            says = zip(logits, self.presents, strict=True)
            logits = [remembered + present(seen) for remembered, present in says]
        for place, size in enumerate(self.space.sizes):
            if size < widest:
                closed = (0, widest - size)
                logits[place] = pad(logits[place], closed, value=constants.MASK_VALUE)
        return torch.stack(logits, -2), self.value_head(judged).squeeze(-1)


def mlp(inputs: int, outputs: int, smooth: int = 0) -> nn.Sequential:
    """With one ReLU, or so many layers of tanh."""
    width = inputs // 2
    more = [part for _ in range(1, smooth) for part in (nn.Linear(width, width), nn.Tanh())]
    inner = [nn.Tanh() if smooth else nn.ReLU(), *more]
    return nn.Sequential(nn.Linear(inputs, width), *inner, nn.Linear(width, outputs))


def unwrapped(network: nn.Module) -> RecurrentActorCritic:
    """The network itself, whether or not `torch.compile` was called on it."""
    inner = getattr(network, "_orig_mod", network)
    if not isinstance(inner, RecurrentActorCritic):
        what, given = "This is not a network that the agent can train", type(inner).__name__
        valid = "FactoredRecurrentActorCritic or TokenActorCritic, compiled or not"
        raise AgreementError(what, given=given, valid=valid)
    return inner


# --- observations in comparable units ------------------------------------------------------------


class RunningNorm(nn.Module):
    """Subtracts the mean and divides by the standard deviation of everything seen so far.

    It changes only in `observe`, which the agent calls between an update and the next rollout:
    what was decided and what is learned from it see the same numbers. Before the first time it
    only clips. Its buffers are saved with the network.

    With `keeps_marks` a feature that was only ever 0 or 1, and rarely 1, stays as it is: what is
    absent would write into a memory too, and what is loud there drowns what was seen before. What
    acts at once may have it `louder`. The first time decides; what turns out to be no mark later is
    treated as the others from then on, for good: inputs must not jump to and fro.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor
    floor: Tensor  # the smallest variance that is divided by
    others: Tensor | None  # [F] 0: a mark, 1: any other feature; none where no marks are kept

    def __init__(self, features: int, keeps_marks: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(features, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("floor", torch.full((), EPSILON, dtype=torch.float64))
        self.register_buffer("others", torch.zeros_like(self.mean) if keeps_marks else None)
        self._known: tuple[torch.dtype, tuple[Any, ...], tuple[int, ...], Units] | None = None

    def forward(self, states: Tensor) -> Tensor:
        """[..., F] in the type of the input."""
        scale, shift, _ = self._units(states.dtype)
        return torch.addcmul(shift, states, scale).clamp(-CLIP, CLIP)

    def louder(self, seen: Tensor) -> Tensor:
        """What `forward` gave, with marks in units of their standard deviation: rare ones most."""
        return seen if self.others is None else seen * self._units(seen.dtype)[2]

    def _units(self, dtype: torch.dtype) -> Units:
        """[F] each: scale and shift, and by how much marks are louder.

        They are worked out anew only when a buffer is another or was written to since: every step
        asks for them, and the buffers change between rollouts.
        """
        passing = torch.is_inference_mode_enabled() or self.mean.is_inference()
        if passing or torch.compiler.is_compiling():
            return self._worked_out(dtype)
        buffers = tuple(self._buffers.values())
        written = tuple(-1 if buffer is None else buffer._version for buffer in buffers)
        if self._known is not None:
            known, of, then, found = self._known
            if known is dtype and then == written and all(map(operator.is_, of, buffers)):
                return found
        found = self._worked_out(dtype)
        self._known = (dtype, buffers, written, found)
        return found

    def _worked_out(self, dtype: torch.dtype) -> Units:
        scale, shift = self.variance.clamp(min=self.floor).rsqrt(), -self.mean
        louder, others = scale.clamp(max=CLIP), self.others
        if others is not None:
            louder = louder.masked_fill(others > 0, 1.0)
            scale, shift = scale.where(others > 0, 1.0), shift * others
        return scale.to(dtype), (shift * scale).to(dtype), louder.to(dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}  # a copy has buffers of its own

    @torch.no_grad()
    def observe(self, states: Tensor, valid: Tensor | None = None, summed: Summed = alone) -> None:
        """Take states [..., F] into account, all or the `valid` [...] ones, of all processes."""
        if not len(self.mean):  # of a network that takes states as they are
            return
        if states.ndim < 2 or states.shape[-1] != len(self.mean):
            what, given = "Observations to normalise have the wrong shape", list(states.shape)
            raise AgreementError(what, given=given, valid=f"[..., {len(self.mean)}]")
        if valid is None:
            valid = torch.ones(states.shape[:-1], dtype=torch.bool, device=states.device)
        left_out = ~valid.flatten()[:, None]
        seen = states.flatten(0, -2).double().masked_fill(left_out, 0.0)
        total = summed(torch.cat((seen.sum(0), valid.sum().double()[None])))  # [F + 1]
        news = total[-1]
        mean = total[:-1] / news.clamp(min=1)
        centred = (seen - mean).masked_fill(left_out, 0.0)
        variance = summed(centred.square().sum(0)) / news.clamp(min=1)
        before, count = self.count, self.count + news
        weight = news / count.clamp(min=1)
        apart = mean - self.mean
        # Chan's formula for the variance of two sets together.
        between = apart**2 * weight * (before / count.clamp(min=1))
        self.variance.lerp_(variance, weight).add_(between)
        self.mean.add_(apart * weight)
        if self.others is not None:  # only of zeros and ones the mean is that of their squares
            other = (self.variance + self.mean.square() - self.mean).abs() >= MARKS_ROUNDING
            other |= self.mean >= torch.where(before > 0, COMMON, RARE)
            self.others.masked_fill_(other & (count > 0), 1.0)
        self.count.copy_(count)


# --- an LSTM over whole sequences in which episodes end and begin --------------------------------


def reset_hidden(hidden: Hidden, starts: Tensor) -> Hidden:
    """The state entering a step: zero in the rows [N] where that step begins an episode.

    Rollout and update both go through here. Replaced, not multiplied: what a failed environment
    left behind may be NaN.
    """
    fresh = starts.to(hidden[0].device, non_blocking=True)[None, :, None]
    h, c = (part.masked_fill(fresh, 0.0) for part in hidden)
    return h, c


def run_step(lstm: nn.Module, inputs: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
    """Outputs [N, D] for one step's inputs [N, D], and the state after it."""
    if isinstance(lstm, nn.LSTM) and lstm.num_layers == 1 and inputs.device.type == "cpu":
        # Less than half the time: a whole LSTM on the CPU first puts its weights in another order.
        h, c = torch.lstm_cell(inputs, (hidden[0][0], hidden[1][0]), *lstm.all_weights[0])
        return h, (h[None], c[None])
    outputs, after = lstm(inputs[:, None], hidden)
    return outputs[:, 0], after


def run_sequences(
    lstm: nn.Module, inputs: Tensor, hidden: Hidden, starts: Tensor | None = None
) -> Tensor:
    """Outputs [N, T, D] for inputs [N, T, D]; `starts` [N, T] bool marks resets.

    `starts` decides the shape of the computation and so belongs on the CPU. With no reset inside
    a sequence this is one call of the LSTM. Otherwise sequences are cut at the resets, and pieces
    of similar length run side by side, padded.
    """
    if starts is not None:
        what = "Episode starts must have a boolean for each step"
        require_form(what, starts, inputs.shape[:2], torch.bool)
        starts = starts.cpu()
        hidden = reset_hidden(hidden, starts[:, 0])
        if bool(starts[:, 1:].any()):
            return _run_pieces(lstm, inputs, hidden, starts)
    outputs: Tensor = lstm(inputs, hidden)[0]
    return outputs


def _run_pieces(lstm: nn.Module, inputs: Tensor, hidden: Hidden, starts: Tensor) -> Tensor:
    N, T = starts.shape

    def there(index: Tensor) -> Tensor:
        return index.to(inputs.device, non_blocking=True)

    groups, back = _pieces(starts)
    steps = inputs.flatten(0, 1)  # [N * T, D]
    outputs = []
    for owner, fresh, source in groups:
        owners = there(owner)
        h, c = (part.index_select(1, owners) for part in hidden)
        entering = reset_hidden((h, c), fresh)
        padded = steps.index_select(0, there(source.flatten())).view(*source.shape, -1)
        outputs.append(lstm(padded, entering)[0].flatten(0, 1))
    joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return joined.index_select(0, there(back)).view(N, T, -1)


def _pieces(starts: Tensor) -> Pieces:
    """Pieces of sequences between starts [N, T], in groups of similar length.

    Of each group: the pieces' sequences [K], whether they begin with an empty memory [K], and which
    step stands where, [K, longest], of all N * T. Then where the output of each step will stand. By
    numpy, which is several times faster with few numbers.
    """
    if starts.numel() > KEPT_STEPS or torch.compiler.is_compiling():
        return _cut(starts.numpy())
    return _remembered(starts.numpy().tobytes(), *starts.shape)


@lru_cache(maxsize=16)  # a minibatch of one sequence, or of all, comes again in every epoch
def _remembered(starts: bytes, N: int, T: int) -> Pieces:
    return _cut(np.frombuffer(starts, bool).reshape(N, T))


def _cut(starts: NDArray[np.bool]) -> Pieces:
    N, T = starts.shape
    cuts = starts.copy()
    cuts[:, 0] = True  # every sequence begins a piece, with the state it carries
    owner, begin = cuts.nonzero()  # [K] in order of place
    place = owner * T + begin  # [K] in the steps of all sequences, one after the other
    lengths = np.diff(place, append=N * T)  # [K]
    order = np.argsort(-lengths, kind="stable")
    lengths = lengths[order]
    groups: list[tuple[Tensor, ...]] = []
    ran, back = 0, np.empty(N * T, np.int64)
    for first, after in _similar(lengths.tolist()):
        group, time = order[first:after], np.arange(lengths[first])
        inside = time < lengths[first:after, None]  # [pieces, longest]
        source = place[group, None] + time
        back[source[inside]] = ran + np.flatnonzero(inside)
        ran += inside.size
        parts = (owner[group], begin[group] > 0, np.minimum(source, N * T - 1))
        groups.append(tuple(map(torch.from_numpy, parts)))
    return groups, torch.from_numpy(back)


def _similar(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of lengths, longest first, in which none is much shorter than the first."""
    first = 0
    for index, length in enumerate(lengths):
        if length * MAX_PADDING >= lengths[first]:
            continue
        if lengths[first] * (len(lengths) - index) - sum(lengths[index:]) > WORTH_A_CALL:
            yield first, index
            first = index
    yield first, len(lengths)
