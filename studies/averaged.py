"""Networks over tokens that learn from single moments: what they say of many at once, and a mean
of what they were in their latest steps.

Shapes: `D` moments, `F` features, of logits as in `TokenActorCritic`.
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import LayerNorm

from esper.archive import Archive
from esper.garden import LAYOUT
from esper.leyline.streams import derive_seed
from esper.tamiyo import TokenActorCritic

RECENT = 10.0  # the mean of weights is of about the latest tenth of all steps
RATE, DECAY, DROPOUT = 2.5e-3, 0.1, 0.05


def decode_without_memory(
    network: TokenActorCritic, observations: Tensor
) -> tuple[Mapping[str, Tensor], Tensor]:
    """Return logits by head and values of single moments, without running the LSTM.

    The output of the LSTM is replaced by zeros. It has no influence in these networks, because
    `memory_proj` is zero.

    Args:
        network: A network whose `memory_proj` is zero.
        observations: Moments, [D, F].

    Returns:
        Logits by head, and values in units of the return scale, [D].
    """
    memory = observations.new_zeros(len(observations), network.lstm_hidden_dim)
    return network.decode(memory, network.encode(observations), observations)


def dropped(tokens: Tensor, share: float) -> Tensor:
    """`tokens` with about this share of their numbers, in steps of 1/256, made zero and the others
    larger by as much. One random byte decides on each: single draws took a fifth of a fit."""
    few = round(share * 256)
    drawn = torch.empty(-(-tokens.numel() // 8), dtype=torch.int64, device=tokens.device)
    drawn = drawn.random_(-(2**63), None).view(torch.uint8)[: tokens.numel()].view(tokens.shape)
    return tokens * ((drawn >= few).to(tokens.dtype) * (256 / (256 - few)))


class Averaged:
    """A network that learns from single moments, so its memory has no say.

    `network` learns; `mean` is what it was in its latest steps, and judged and kept.
    """

    def __init__(self, seed: int, device: str, rate: float = RATE, decay: float = DECAY,
                 drop: float = DROPOUT) -> None:  # fmt: skip
        torch.manual_seed(derive_seed(seed, "fit"))
        self.steps = 0
        self.network = TokenActorCritic(LAYOUT).to(device)
        with torch.no_grad():
            for silent in self.network.memory_proj.parameters():
                silent.zero_()
        self.prepare()
        self.mean = copy.deepcopy(self.network).eval()
        for part in self.network.modules():
            if isinstance(part, LayerNorm):
                part.register_forward_hook(lambda _, __, out: dropped(out, drop))
        deaf = {id(each) for part in (self.network.memory_proj, self.network.lstm)
                for each in part.parameters()}  # fmt: skip
        self.learning = [each for each in self.network.parameters() if id(each) not in deaf]
        self.optimiser = torch.optim.AdamW(
            self.learning, lr=rate, weight_decay=decay, betas=(0.9, 0.99)
        )

    def prepare(self) -> None:
        """What is different at first in networks of a kind."""

    def step(self, loss: Tensor) -> None:
        self.network.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.learning, 1.0)
        self.optimiser.step()
        self.steps += 1
        fresh = RECENT / (RECENT + self.steps)  # of what it is now
        with torch.no_grad():
            now = list[Tensor](self.network.parameters())
            torch._foreach_lerp_(list(self.mean.parameters()), now, fresh)

    def tensors(self) -> dict[str, Tensor]:
        """All that is needed to go on."""
        moments = {
            f"optimiser.{number}.{name}": value
            for number, own in self.optimiser.state_dict()["state"].items()
            for name, value in own.items()
        }
        weights = {
            f"{kind}.{name}": each
            for kind, held in (("network", self.network), ("mean", self.mean))
            for name, each in held.state_dict().items()
        }
        return {name: each.detach().cpu().clone() for name, each in (weights | moments).items()}

    def restore(self, archive: Archive) -> None:
        for kind, held in (("network", self.network), ("mean", self.mean)):
            held.load_state_dict(archive.part(kind))
        moments = dict[int, dict[str, Tensor]]()
        for name, each in archive.part("optimiser").items():
            number, _, field = name.partition(".")
            moments.setdefault(int(number), {})[field] = each
        self.optimiser.load_state_dict(self.optimiser.state_dict() | {"state": moments})
        self.steps = int(moments[0]["step"])
