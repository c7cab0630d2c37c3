"""Lessons: what a teacher would have done in states that an agent came to, and learning from it.

An apprentice acts, a teacher that knows the context says what it would do in the same state, and
the apprentice learns to foresee that from what it sees: imitation on its own states. The value
head learns from the returns meanwhile.

Shapes: `R` sequences, `T` time, `F` features, `H` heads, `A` actions of the largest head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.leyline import Actions, AgreementError, Legality
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import NonFiniteError
from esper.simic.agent.update import step_optimizer
from esper.tamiyo import MaskedCategorical, stack_logits


@dataclass(frozen=True)
class Lessons:
    """Labelled sequences, on the agent's device."""

    states: Tensor  # [R, T, F]
    labels: Tensor  # [R, T, H] int64: what the teacher would have done
    masks: Tensor  # [R, T, H, A] bool: what each head could take on the way to that
    returns: Tensor  # [R, T]
    valid: Tensor  # [R, T] bool

    def __post_init__(self) -> None:
        sizes = {name: tensor.shape[:2] for name, tensor in vars(self).items()}
        if len(set(sizes.values())) != 1:
            raise AgreementError(
                "Lessons differ in sequences or time",
                given=", ".join(f"{name} {list(size)}" for name, size in sizes.items()),
            )

    def __len__(self) -> int:
        return len(self.valid)

    def and_(self, other: "Lessons") -> "Lessons":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Lessons(*(torch.cat(pair) for pair in pairs))

    def rows(self, index: Tensor) -> "Lessons":
        return Lessons(*(tensor[index] for tensor in vars(self).values()))


class Notebook(list[tuple[Tensor, Tensor]]):
    """What the teacher says during one rollout: labels and masks, step by step."""

    def write(self, legality: Legality, actions: Actions) -> None:
        values = actions.canonical().values
        self.append((values, legality.resolved(values)))

    def lessons(self, agent: PPOAgent) -> Lessons:
        """With the states and returns of the agent's finished rollout."""
        batch = agent.buffer.get_batched_sequences(agent.device)
        labels, masks = (torch.stack(each, 1).to(agent.device) for each in zip(*self, strict=True))
        return Lessons(batch.states, labels, masks, batch.returns, batch.valid)


@dataclass(frozen=True, kw_only=True)
class LessonSettings:
    """How an apprentice learns."""

    learning_rate: float = 2e-3
    final_rate: float = 0.2  # of that, when the teacher leaves
    passes: int = 10  # over all lessons so far, after every round
    sequences: int = 400  # of a minibatch
    noise: float = 0.1  # standard deviations added to what is seen, so that no case is known again
    value_coef: float = 0.25


def blurred(agent: PPOAgent, states: Tensor, noise: float) -> Tensor:
    """The states with noise in units of what each feature varies by."""
    if noise == 0.0:
        return states
    norm = agent.network.observation_norm
    width = norm.variance.clamp(min=norm.floor).sqrt().to(states.dtype)
    return states + noise * width * torch.empty_like(states).normal_(generator=agent.sampler)


def learn_lessons(agent: PPOAgent, lessons: Lessons, settings: LessonSettings) -> float:
    """Make the teacher's decisions likelier; returns the mean -log-probability of the last pass."""
    network = agent.network
    for group in agent.optimizer.param_groups:
        group["lr"] = settings.learning_rate
    seen: list[Tensor] = []
    broken = torch.zeros((), dtype=torch.bool, device=agent.device)
    for _ in range(settings.passes):
        order = torch.randperm(len(lessons), generator=agent.shuffler)
        seen = []
        for rows in order.split(settings.sequences):
            part = lessons.rows(rows.to(agent.device))
            output = network(blurred(agent, part.states, settings.noise))
            logits = stack_logits(output.logits, agent.action_space, part.labels)
            log_probs = MaskedCategorical(logits, part.masks, False).log_prob(part.labels)
            steps = part.valid.sum().clamp(min=1)
            missed = -(log_probs.sum(-1).masked_fill(~part.valid, 0.0)).sum() / steps
            apart = (output.values - part.returns) / network.return_scale
            error = apart.square().masked_fill(~part.valid, 0.0).sum() / steps
            loss = missed + settings.value_coef * error
            loss.backward()
            norm = nn.utils.clip_grad_norm_(network.parameters(), agent.config.max_grad_norm)
            broken = broken | ~(loss.isfinite() & norm.isfinite())
            step_optimizer(agent.optimizer, broken.float())
            seen.append(missed.detach())
    if bool(broken):
        raise NonFiniteError(
            "The loss of a lesson is NaN or infinite",
            given="its log-probs, its values or their gradient",
            fix="the weights are those before that step: lower the lessons' learning rate",
        )
    return float(torch.stack(seen).mean())
