"""A population beside N reference trainers that get the same weights, data and decisions."""

from collections.abc import Callable

import torch
from torch import Tensor

from esper.kasmina import GateRules, SlottedModel
from esper.kasmina.hosts import Conv1dHost, Conv2dHost, FoldedHost, GptHost, MlpHost, SegmentedHost
from esper.leyline import Actions, Legality, LifecycleOp
from esper.tolaria.data.splits import Split, Splits
from esper.tolaria.feed import Feed
from esper.tolaria.optimisers import AdamW, Sgd
from esper.tolaria.population import Population, extract
from esper.tolaria.population_config import PopulationConfig
from esper.tolaria.tasks import mean_loss
from tests.tolaria.reference import accuracy, train_epoch

HOSTS: dict[str, Callable[[], SegmentedHost]] = {
    "mlp": lambda: MlpHost(features=12, width=6, classes=4),
    "conv1d": lambda: Conv1dHost(length=12, channels=3, kernel=3, classes=4),
    "conv2d": lambda: Conv2dHost(channels_in=1, size=6, widths=(3, 4, 4), classes=4),
}
# The transformer runs longest: it takes part where populations are compared with the reference.
BENT: dict[str, Callable[[], SegmentedHost]] = {
    "gelu": lambda: MlpHost(features=12, width=6, classes=4, activation="gelu", norm="layer"),
    "tanh": lambda: Conv1dHost(
        length=12, channels=3, kernel=3, classes=4, activation="tanh", norm="layer"
    ),
    "folded": lambda: FoldedHost(channels=3, classes=4, norm="layer"),
}
GPT = {"gpt": lambda: GptHost(vocabulary=4, width=4, heads=2, context=5)}
EVERY_HOST = HOSTS | GPT
SHAPES = {"mlp": (12,), "conv1d": (12,), "conv2d": (1, 6, 6), "gpt": (5,)}
SHAPES |= {"gelu": (12,), "tanh": (12,), "folded": (40,)}


def make_splits(host: str, seed: int = 0, samples: int = 40) -> Splits:
    draw = torch.Generator().manual_seed(seed)

    def split(count: int) -> Split:
        if host == "gpt":  # tokens, each with the one after it as its label
            text = torch.randint(4, (count, 6), generator=draw)
            return Split(text[:, :-1], text[:, 1:])
        inputs = torch.randn(count, *SHAPES[host], generator=draw, dtype=torch.float64)
        return Split(inputs, torch.randint(4, (count,), generator=draw))

    return Splits(train=split(samples), validation=split(30), test=split(30), classes=4, origin="")


def make_population(
    host: str,
    count: int,
    *,
    first: int = 0,
    batches: int = 3,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    **settings: object,
) -> Population:
    feed = Feed(
        [make_splits(host, seed) for seed in (0, 1)],
        [identity % 2 for identity in range(first, first + count)],
        batch=8,
        batches=batches,
        dtype=dtype,
        device=device,
    )
    settings.setdefault("rules", GateRules.unmeasured())
    return Population(
        (EVERY_HOST | BENT)[host],
        feed,
        identities=range(first, first + count),
        seed=1,
        config=PopulationConfig(dtype=dtype, **settings),  # type: ignore[arg-type]
    )


def held(population: Population) -> dict[str, Tensor]:
    """Everything that makes up the hosts and seeds of a population, by name."""
    snapshot = population.snapshot()
    found = {**snapshot.lifecycle.state_dict(), **snapshot.kept}
    for key, pool in population.pools.items():
        kept = {"owner": pool.owner, **snapshot.tensors[key]}
        found |= {f"{key} {name}": tensor for name, tensor in kept.items()}
    return found


def draw_actions(legal: Legality, draws: Callable[[str], Tensor], eager: float = 0.8) -> Actions:
    """Legal actions, head by head; each environment decides from its own random numbers."""
    values = torch.zeros(legal.hosts, len(legal.space), dtype=torch.int64)
    for position, name in enumerate(legal.space.names):
        mask = legal.mask(name, values)
        chances = draws(name)[:, : mask.shape[1]] * mask
        if position == 0:
            chances[:, LifecycleOp.WAIT] *= 1 - eager
            chances[:, LifecycleOp.PRUNE] *= 0.5
        values[:, position] = chances.argmax(dim=1)
    return Actions(legal.space, values)


class Twins:
    """Reference trainers for every environment of a population."""

    def __init__(self, population: Population) -> None:
        self.population = population
        self.hosts = [extract(population, index) for index in range(len(population))]
        self.optimizers = [self._optimizer(host) for host in self.hosts]

    def _optimizer(self, host: SlottedModel) -> torch.optim.Optimizer:
        config = self.population.config
        optimizer: torch.optim.Optimizer
        if isinstance(config.optimiser, AdamW):
            optimizer = torch.optim.AdamW(
                host.parameters(),
                lr=config.rate,
                weight_decay=config.decay,
                eps=config.optimiser.epsilon,
            )
        else:
            assert isinstance(config.optimiser, Sgd)
            optimizer = torch.optim.SGD(
                host.parameters(),
                lr=config.rate,
                momentum=config.optimiser.momentum,
                weight_decay=config.decay,
            )
        host.track(optimizer)
        return optimizer

    def apply(self, actions: Actions) -> None:
        """The same decisions; newborn seeds take over the population's weights."""
        self.population.apply(actions)
        for index, host in enumerate(self.hosts):
            host.apply(Actions(actions.space, actions.values[index : index + 1]))
            if actions["op"][index] == LifecycleOp.GERMINATE:
                newborn = extract(self.population, index)
                slot = int(actions["slot"][index])
                host.slots[slot].load_state_dict(newborn.slots[slot].state_dict())

    def epoch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Train one epoch on the same batches; losses [N], seed gradients [N, S], accuracy [N]."""
        population = self.population
        index = population.feed.epoch(population.seeds, population.lifecycle.epoch)
        inputs, labels = population.feed.samples_at(index)  # [T, N, B, ...]
        losses, scores = [], []
        gradients = torch.full(population.lifecycle.shape, torch.nan, dtype=torch.float64)
        for n, (host, optimizer) in enumerate(zip(self.hosts, self.optimizers, strict=True)):
            batches = zip(inputs[:, n], labels[:, n], strict=True)
            report = train_epoch(host, optimizer, mean_loss, batches)
            losses.append(report.loss)
            for name, norm in report.gradient.items():
                gradients[n, population.catalogue.slots.index(name)] = norm
            scores.append(self.score(n))
        return torch.tensor(losses, dtype=torch.float64), gradients, torch.tensor(scores)

    def score(self, n: int) -> float:
        environment = torch.tensor([n])
        ((inputs, labels),) = self.population.feed.held_out("validation", environment)
        return accuracy(self.hosts[n], inputs[0], labels[0])

    @torch.no_grad()
    def validation_loss(self, n: int) -> Tensor:
        ((inputs, labels),) = self.population.feed.held_out("validation", torch.tensor([n]))
        return mean_loss(self.hosts[n].eval()(inputs[0]), labels[0]).double()

    def difference(self) -> float:
        """The largest relative difference of any parameter of any environment."""
        worst = 0.0
        for index, host in enumerate(self.hosts):
            mine = extract(self.population, index).state_dict()
            for name, value in host.state_dict().items():
                if name.startswith("counters"):
                    continue
                a, b = mine[name].double(), value.double()
                scale = max(float(b.abs().max()) if b.numel() else 0.0, 1e-3)
                gap = float((a - b).abs().max()) if a.numel() else 0.0
                worst = max(worst, gap / scale)
        return worst
