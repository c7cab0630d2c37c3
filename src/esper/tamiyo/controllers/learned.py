"""Tamiyo: a trained network as a controller.

Shapes: `N` rows, `F` features, `H` heads, `A` actions of the largest head.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.heads import HEADS
from esper.leyline.legality import Actions, Legality
from esper.leyline.signals import Signals
from esper.leyline.slots import require_agreement
from esper.tamiyo.controllers.proposals import draw
from esper.tamiyo.distributions import MaskedCategorical
from esper.tamiyo.features import FeatureTable, signals_to_features
from esper.tamiyo.network import FactoredRecurrentActorCritic
from esper.tamiyo.sequences import Hidden


class LearnedController:
    """A trained network that decides and does not learn; it remembers through an episode.

    Greedy, or by chance: with the environments' own draws, so that a row's decisions do not
    depend on its neighbours. Worlds that are not a garden hand over their observations [N, F]
    in place of signals; chance is then torch's, from `generator`.
    """

    needs_contributions = True  # it was trained with them

    def __init__(
        self,
        network: FactoredRecurrentActorCritic,
        *,
        greedy: bool = True,
        name: str = "tamiyo",
        generator: torch.Generator | None = None,
        blueprints: tuple[str, ...] = (),
    ) -> None:
        """`blueprints`: those of the hosts it was trained on, if they are known."""
        self.network, self.greedy, self.name = network, greedy, name
        self.blueprints = blueprints
        self.generator = generator
        self._hidden: Hidden | None = None

    @property
    def fingerprint(self) -> str:
        """A hash of the network: another training has another one."""
        found = hashlib.blake2b(f"greedy {self.greedy}".encode(), digest_size=6)
        for name, tensor in sorted(self.network.state_dict().items()):
            found.update(name.encode())
            found.update(tensor.cpu().contiguous().numpy().tobytes())
        return found.hexdigest()

    def memory(self) -> dict[str, Tensor]:
        return {} if self._hidden is None else dict(zip("hc", self._hidden, strict=True))

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        device = self.network.return_scale.device
        self._hidden = (memory["h"].to(device), memory["c"].to(device)) if memory else None

    def require_possible(self, catalogue: BlueprintCatalogue, horizon: int) -> None:
        """Refuse hosts with other slots or blueprints than it was trained on."""
        space = HEADS.resolve(catalogue)
        ours, theirs = "the trained controller", "the host"
        slots = (ours, self.network.space.size("slot")), (theirs, space.size("slot"))
        require_agreement("the number of slots", *slots)
        if self.blueprints:
            require_agreement("blueprints", (ours, self.blueprints), (theirs, catalogue.names))
        require_agreement("action heads", (ours, self.network.space), (theirs, space))
        size = ("the host", FeatureTable.of(catalogue).size)
        require_agreement("features", ("the trained controller", self.network.state_dim), size)

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
