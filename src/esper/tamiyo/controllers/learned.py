"""Tamiyo: a trained network as a controller.

Shapes: `N` rows, `F` features, `H` heads, `A` actions of the largest head.
"""

import torch
from torch import Tensor

from esper.leyline.legality import Actions, Legality
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.proposals import draw
from esper.tamiyo.distributions import MaskedCategorical
from esper.tamiyo.features import signals_to_features
from esper.tamiyo.network import FactoredRecurrentActorCritic
from esper.tamiyo.sequences import Hidden


class LearnedController:
    """A trained network that decides and does not learn; it remembers through an episode.

    Greedy, or by chance: with the environments' own draws, so that a row's decisions do not
    depend on its neighbours. Worlds that are not a garden hand over their observations [N, F]
    in place of signals; chance is then torch's, from `generator`.
    """

    def __init__(
        self,
        network: FactoredRecurrentActorCritic,
        *,
        greedy: bool = True,
        name: str = "tamiyo",
        generator: torch.Generator | None = None,
    ) -> None:
        self.network, self.greedy, self.name = network, greedy, name
        self.generator = generator
        self._hidden: Hidden | None = None

    @torch.no_grad()
    def act(self, signals: Signals | Tensor, legality: Legality, starts: Tensor) -> Actions:
        if bool(starts.all()):
            self._hidden = None
        device = self.network.return_scale.device
        seen = signals if isinstance(signals, Tensor) else signals_to_features(signals)
        if self.greedy or isinstance(signals, Tensor):
            choice, _, self._hidden = self.network.get_action(
                seen.to(device),
                legality,
                self._hidden,
                starts,
                greedy=self.greedy,
                generator=self.generator,
            )
            return Actions(self.network.space, choice.actions.cpu())
        logits, _, self._hidden = self.network(seen.to(device), self._hidden, starts)
        return drawn(logits.cpu(), legality, signals.draws)


def drawn(logits: Tensor, legality: Legality, draws: Tensor) -> Actions:
    """Composite actions from logits [N, H, A], one number from 0 to 1 for each head in `draws`."""
    space = legality.space
    values = Actions.of(space, legality.hosts).values
    for head, (name, size) in enumerate(zip(space.names, space.sizes, strict=True)):
        chances = MaskedCategorical(logits[:, head, :size], legality.mask(name, values)).probs
        values[:, head] = draw(chances, draws[:, head])
    return Actions(space, values)
