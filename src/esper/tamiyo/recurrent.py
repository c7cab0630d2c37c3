"""The part that all of Tamiyo's networks share: LSTM, action sampling, evaluation, value scale.

Shapes: `N` rows or sequences, `T` time, `F` state features, `L` layers, `D` hidden size, `H` heads,
`A` actions of the largest head.
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline import ActionSpace, AgreementError, Legality, constants, require_agreement
from esper.leyline.slots import require_form
from esper.tamiyo.distributions import (
    EnvSlice,
    Logits,
    MaskedCategorical,
    SampledActions,
    sample_actions,
    stack_conditional_logits,
    stack_logits,
)
from esper.tamiyo.normalization import AllReduceSum, RunningNorm, local_sum
from esper.tamiyo.sequences import Hidden, reset_hidden, run_sequences, run_step

HIDDEN_GAIN = math.sqrt(2.0)  # orthogonal initialisation before a ReLU or tanh
POLICY_GAIN = 0.01  # the initial policy is nearly uniform
VALUE_GAIN = 1.0
FORGET_GATE_BIAS = 1.0  # the LSTM keeps its memory by default (Jozefowicz et al. 2015)


class ActorCriticOutput(NamedTuple):
    """Output of a network for one step or for whole sequences."""

    logits: Logits  # by head: [N, actions] or [N, T, actions]
    values: Tensor  # [N] or [N, T], in units of the return
    hidden: Hidden | None  # after a single step; None for sequences


class Evaluation(NamedTuple):
    """Stored decisions, evaluated with the current weights; carries gradient."""

    log_probs: Tensor  # [N, T, H]
    entropies: Tensor  # [N, T, H], from 0 to 1
    values: Tensor  # [N, T], in units of the return


class RecurrentActorCritic(nn.Module, ABC):
    """A recurrent network with one policy head for each action head, and a value head.

    A subclass defines `encode`, which computes the input of the LSTM from the states, and `decode`,
    which computes logits and values from its output.

    The value head predicts returns in units of `return_scale`, a running size of the returns
    (van Hasselt et al. 2016, "PopArt", without the shift).
    """

    action_space: ActionSpace
    state_dim: int
    lstm_hidden_dim: int
    lstm_layers: int
    observation_norm: RunningNorm
    lstm: nn.Module  # called as an `nn.LSTM` with `batch_first=True`
    heads: nn.ModuleDict  # by head name; all other parameters are shared
    value_head: nn.Sequential
    return_scale: Tensor  # []
    return_moment: Tensor  # [] decaying mean of the squared returns
    return_weight: Tensor  # [] total weight of that mean

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("return_scale", torch.ones(()))
        self.register_buffer("return_moment", torch.zeros((), dtype=torch.float64))
        self.register_buffer("return_weight", torch.zeros((), dtype=torch.float64))

    @abstractmethod
    def encode(self, states: Tensor) -> Tensor:
        """Return the inputs of the LSTM [..., D] for states [..., F]."""

    @abstractmethod
    def decode(self, memory: Tensor, encoded: Tensor, states: Tensor) -> tuple[Logits, Tensor]:
        """Return logits by head, and values [...] in units of the return scale.

        Args:
            memory: Outputs of the LSTM, [..., D].
            encoded: Its inputs, [..., D].
            states: States, [..., F].
        """

    def forward(
        self, states: Tensor, hidden: Hidden | None = None, starts: Tensor | None = None
    ) -> ActorCriticOutput:
        """Compute logits and values of one step or of whole sequences.

        Args:
            states: States of one step, [N, F], or of whole sequences, [N, T, F].
            hidden: Hidden state that enters the first step, [L, N, D] each; zero by default.
            starts: Steps that begin an episode, [N] or [N, T] bool. The hidden state is zero there.
        """
        if states.ndim not in (2, 3) or states.shape[-1] != self.state_dim:
            given = list(states.shape)
            valid = f"[rows, {self.state_dim}] or [rows, time, {self.state_dim}]"
            raise AgreementError("States have the wrong shape", given=given, valid=valid)
        if hidden is None:
            hidden = self.get_initial_hidden(len(states), states.device, states.dtype)
        encoded = self.encode(states)
        if states.ndim == 2:
            memory, hidden_after = self._run_step(encoded, hidden, starts)
        else:
            memory, hidden_after = self._run_sequences(encoded, hidden, starts), None
        logits, scaled_values = self.decode(memory, encoded, states)
        return ActorCriticOutput(logits, scaled_values.float() * self.return_scale, hidden_after)

    def _run_step(
        self, inputs: Tensor, hidden: Hidden, starts: Tensor | None
    ) -> tuple[Tensor, Hidden]:
        if starts is not None:
            hidden = reset_hidden(hidden, starts)
        return run_step(self.lstm, inputs, hidden)

    def _run_sequences(self, inputs: Tensor, hidden: Hidden, starts: Tensor | None) -> Tensor:
        return run_sequences(self.lstm, inputs, hidden, starts)

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
        env_slice: EnvSlice | None = None,
        validate: bool = True,
        with_entropy_masks: bool = True,
    ) -> tuple[SampledActions, Tensor, Hidden]:
        """Choose an action for every row, **without gradient**.

        The returned log-probabilities are not differentiable. Use `evaluate_actions` for a loss.

        Args:
            states: States, [N, F].
            legality: Legal actions of the same rows.
            hidden: Hidden state that enters the step, [L, N, D] each; zero by default.
            starts: Rows that begin an episode, [N] bool.
            greedy: Take the most probable action of every head instead of sampling.
            generator: Random generator on the device of the network.
            env_slice: Position of the rows among those of all processes; see
                `MaskedCategorical.sample`.
            validate: Raise an error for a head without a legal action.
            with_entropy_masks: Return the masks of `distributions.entropy_masks_of` too.

        Returns:
            The sampled actions, the values [N], and the hidden state after the step.
        """
        what = "States to decide on have the wrong shape, or not a row for each row of the masks"
        require_form(what, states, (legality.hosts, self.state_dim))
        spaces = ("network", self.action_space), ("masks", legality.space)
        require_agreement("action heads", *spaces)
        output: ActorCriticOutput = self(states, hidden, starts)
        sampled = sample_actions(
            output.logits,
            legality,
            greedy=greedy,
            generator=generator,
            env_slice=env_slice,
            validate=validate,
            with_entropy_masks=with_entropy_masks,
        )
        assert output.hidden is not None, "a single step returns its hidden state"
        return sampled, output.values, output.hidden

    def evaluate_actions(
        self,
        states: Tensor,
        actions: Tensor,
        masks: Tensor,
        hidden: Hidden | None = None,
        starts: Tensor | None = None,
        *,
        entropy_masks: Tensor | None = None,
        entropy_conditions: Tensor | None = None,
        validate: bool = False,
    ) -> Evaluation:
        """Evaluate stored decisions with the current weights, with gradient.

        Args:
            states: States, [N, T, F]. This and the next two also work without the time axis.
            actions: Actions, [N, T, H].
            masks: Resolved masks, [N, T, H, A] bool.
            hidden: Hidden state that enters the first step, [L, N, D] each; zero by default.
            starts: Steps that begin an episode, [N, T] bool, on the CPU.
            entropy_masks: Masks with which the entropies count, [N, T, H, A] bool; by default
                `masks`. See `distributions.entropy_masks_of`.
            entropy_conditions: Earlier choices to which these masks belong, [N, T, H].
            validate: Raise an error for a head without a legal action.
        """
        num_heads, widest = len(self.action_space), max(self.action_space.sizes)
        shape = (*states.shape[:-1], num_heads)
        require_form("Actions must have a row for each state", actions, shape)
        require_form("Masks must have a row for each state", masks, (*shape, widest))
        output: ActorCriticOutput = self(states, hidden, starts)
        logits = stack_logits(output.logits, self.action_space, actions)
        distribution = MaskedCategorical(logits, masks, validate)
        log_probs = distribution.log_prob(actions)
        if entropy_masks is not None and entropy_conditions is not None:
            logits = stack_conditional_logits(output.logits, self.action_space, entropy_conditions)
            distribution = MaskedCategorical(logits, entropy_masks, validate)
        return Evaluation(log_probs, distribution.entropy(), output.values)

    def get_initial_hidden(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Hidden:
        """Return a zero hidden state, [L, N, D] each; device and dtype default to the weights'."""
        parameter = next(self.parameters())
        shape = (self.lstm_layers, batch_size, self.lstm_hidden_dim)
        h = torch.zeros(shape, device=device or parameter.device, dtype=dtype or parameter.dtype)
        return h, torch.zeros_like(h)

    def _init_weights(
        self, policy_gain: float = POLICY_GAIN, value_gain: float = VALUE_GAIN
    ) -> None:
        """Initialise all weights orthogonally; the gains are those of the output layers."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, HIDDEN_GAIN)
                nn.init.zeros_(module.bias)
        for head in self.heads.values():
            nn.init.orthogonal_(output_layer(head).weight, policy_gain)
        nn.init.orthogonal_(output_layer(self.value_head).weight, value_gain)
        for name, parameter in self.lstm.named_parameters():
            if "weight" in name:
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)
                if "bias_ih" in name:
                    forget_gate_bias(parameter).fill_(FORGET_GATE_BIAS)

    @torch.no_grad()
    def bias_action_logit(self, head: str, action: int, amount: float) -> None:
        """Add `amount` to the logit bias of an action, to change the initial policy."""
        name = self.action_space.names[self.action_space.index(head)]
        output_layer(self.heads[name]).bias[action] += amount

    @torch.no_grad()
    def update_return_scale(
        self, returns: Tensor, valid: Tensor, all_reduce_sum: AllReduceSum = local_sum
    ) -> None:
        """Update the running root mean square of the returns, in which the value head predicts.

        The last layer of the value head is rescaled, so that its predictions do not change.

        Args:
            returns: Returns, [N, T].
            valid: Steps that count, [N, T] bool.
            all_reduce_sum: Sums a tensor over the processes that learn together.
        """
        # Mean square of the new returns of all processes.
        squares = returns.double().masked_fill(~valid, 0.0).square().sum()
        sums = all_reduce_sum(torch.stack((squares, valid.sum().double())))
        mean_square = sums[0] / sums[1].clamp(min=1)

        # Decaying mean with bias correction, as in Adam.
        weight = 1 - constants.RETURN_SCALE_DECAY
        self.return_weight.lerp_(torch.ones_like(self.return_weight), weight)
        self.return_moment.lerp_(mean_square, weight)
        root_mean_square = (self.return_moment / self.return_weight).sqrt()
        scale = root_mean_square.clamp(min=constants.MIN_RETURN_SCALE)

        # Preserve the predicted values.
        ratio = self.return_scale / scale.to(self.return_scale)
        for parameter in output_layer(self.value_head).parameters():
            parameter.mul_(ratio)
        self.return_scale.copy_(scale)


def output_layer(head: nn.Module) -> nn.Linear:
    """Return the last layer of a head."""
    assert isinstance(head, nn.Sequential), "heads are sequential"
    layer = head[-1]
    assert isinstance(layer, nn.Linear), "heads end in a linear layer"
    return layer


def forget_gate_bias(bias: Tensor) -> Tensor:
    """Return the part of an LSTM bias [4 D] that belongs to the forget gate."""
    return bias.detach().chunk(4)[1]  # gates are in the order input, forget, cell, output


def mlp_head(inputs: int, outputs: int) -> nn.Sequential:
    """Return a head with one hidden layer of half the input size."""
    hidden_size = inputs // 2
    return nn.Sequential(nn.Linear(inputs, hidden_size), nn.ReLU(), nn.Linear(hidden_size, outputs))


def unwrap_network(network: nn.Module) -> RecurrentActorCritic:
    """Return the network itself if `network` is compiled, and `network` otherwise.

    Raises:
        AgreementError: The module is not a network that the agent can train.
    """
    if isinstance(network, torch._dynamo.OptimizedModule):
        network = network.get_submodule("_orig_mod")
    if not isinstance(network, RecurrentActorCritic):
        what, given = "This is not a network that the agent can train", type(network).__name__
        valid = "FactoredRecurrentActorCritic or TokenActorCritic, compiled or not"
        raise AgreementError(what, given=given, valid=valid)
    return network
