"""Tasks: what is learned from which data, by which host, at what cost and for how long."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from esper import datasets
from esper.archive.files import read_toml
from esper.datasets import generated, handwritten
from esper.kasmina.hosts import HOSTS, SegmentedHost, build_host
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH
from esper.leyline.errors import DataError, EsperError, in_words, register, require_known
from esper.leyline.settings import Count, NotNegative, Positive, require_settings
from esper.tolaria.data.corpus import corpus_splits, read_corpus
from esper.tolaria.data.removed_sets import refuse_removed_set
from esper.tolaria.data.splits import Split, Splits
from esper.tolaria.feed import Augmentation, Feed
from esper.tolaria.population import Population
from esper.tolaria.population_config import PopulationConfig

GARDEN_BATCH = 50
GARDEN_BATCHES = 40  # an epoch; a smaller data set is cycled, a larger one seen in several
GARDEN_RATE = 3e-3
DEFAULT_BUDGET = 2.0  # room for the garden's largest convolutional seed in each of three slots


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in nats, averaged over all labels: of a class for a sample, logits
    [B, classes] and labels [B], or of one for a token, [B, T, classes] and [B, T]."""
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything that a training run of a growing host needs to know beforehand.

    `load(seed)` returns the data; `load_data` also checks that the host can learn from it.
    """

    name: str
    summary: str
    load: Callable[[int], Splits]
    host: str
    host_sizes: Mapping[str, object] = field(default_factory=dict, hash=False)
    budget: NotNegative = DEFAULT_BUDGET  # parameters that may be added, as a share of the host's
    batch_size: Count = GARDEN_BATCH
    batches_per_epoch: Count = GARDEN_BATCHES
    episode_length: Count = DEFAULT_EPISODE_LENGTH  # epochs
    learning_rate: Positive = GARDEN_RATE
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise EsperError(
                "A task's name must be an identifier",
                given=repr(self.name),
                fix="use a_name_like_this",
            )
        require_known("host", self.host, HOSTS)
        require_settings(self, f"Task {self.name!r} is impossible:")

    def build_host(self) -> SegmentedHost:
        """A new host; its weights come from torch's current random stream."""
        what = f"Host {self.host!r} of task {self.name!r} cannot be built"
        with in_words(what, TypeError, fix=self._advice()):
            return build_host(self.host, **self.host_sizes)

    def budget_params(self) -> int:
        """Parameters that may exist in seeds at most."""
        host_params = sum(parameter.numel() for parameter in self._sketch().parameters())
        return int(self.budget * host_params)

    def load_data(self, seed: int = 0, device: torch.device | str = "cpu") -> Splits:
        """The task's data on the device that trains, refused if the host cannot take it."""
        splits = self.load(seed)
        inputs, labels = splits.train
        sketch = self._sketch()
        expected = [*labels[:1].shape, splits.classes]
        try:
            got = str(list(sketch(inputs[:1].to("meta")).shape))
        except (RuntimeError, ValueError, TypeError) as error:
            got = str(error).splitlines()[0]
        if got != str(expected):
            raise DataError(
                f"Host {self.host!r} of task {self.name!r} does not fit its data",
                given=f"inputs {list(inputs.shape)}, of one sample it makes: {got}",
                valid=f"{expected}, one logit for each of {splits.classes} classes",
                fix=self._advice(),
            )
        # A token without an embedding would bring a GPU down, far from its cause.
        known = [part.num_embeddings for part in sketch.modules() if isinstance(part, nn.Embedding)]
        largest = max(int(split.inputs.max()) for split in splits.named().values())
        if known and largest >= min(known):
            raise DataError(
                f"Host {self.host!r} of task {self.name!r} has no embedding for a token",
                given=largest,
                valid=f"0 to {min(known) - 1}",
                fix=self._advice(),
            )
        return splits.to(device)

    def _advice(self) -> str:
        return f"set host_sizes, now {dict(self.host_sizes)}"

    def _sketch(self) -> SegmentedHost:
        """The host without memory for its weights."""
        with torch.device("meta"):
            return self.build_host()


_REGISTRY: dict[str, Task] = {}


def register_task(task: Task) -> Task:
    """Make a task known by its name."""
    return register("Task", task.name, task, _REGISTRY)


def find_task(name: str) -> Task:
    """Return the task with this name.

    Raises:
        EsperError: If no task has this name. A removed data set is refused with what to do instead.
    """
    if name not in _REGISTRY:
        refuse_removed_set(name)
    require_known("task", name, _REGISTRY, "register your own with register_task(Task(...))")
    return _REGISTRY[name]


def task_names() -> tuple[str, ...]:
    return tuple(_REGISTRY)


def population_of(
    task: Task | str,
    environments: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    **settings: Any,
) -> Population:
    """`environments` hosts on one task, each with its own weights and order of data.

    `settings` are those of `PopulationConfig`; rate and budget are the task's unless given.
    """
    task = find_task(task) if isinstance(task, str) else task
    known = {each.name for each in fields(PopulationConfig)}
    for name in settings:
        require_known("setting of a population", name, sorted(known))
    defaults = {"rate": task.learning_rate, "budget": task.budget_params()}
    config = PopulationConfig(**(defaults | settings))
    feed = Feed(
        [task.load_data(seed, device)],
        [0] * environments,
        batch=task.batch_size,
        batches=task.batches_per_epoch,
        device=device,
        dtype=config.dtype,
        augmentation=task.augmentation,
    )
    return Population(
        task.build_host, feed, identities=range(environments), seed=seed, config=config
    )


# --- presets -------------------------------------------------------------------------------

STDLIB_CONTEXT = 64  # as many bytes as the transformer sees
STDLIB_LIMIT = 2_000_000  # bytes: more than an episode reads


def mnist1d(seed: int) -> Splits:
    """Generate MNIST-1D; another seed gives other samples in all three splits."""
    return _as_splits(datasets.mnist1d(seed), generated.CLASSES, f"generated MNIST-1D, seed {seed}")


def digits(seed: int) -> Splits:
    """Load the handwritten digits; the test split is the same for every seed."""
    origin = f"handwritten digits of the UCI repository, 8×8, sha256 {handwritten.DIGITS_SHA256}"
    return _as_splits(datasets.digits(seed), handwritten.CLASSES, origin)


def _as_splits(data: datasets.DataSets, classes: int, origin: str) -> Splits:
    return Splits(
        train=Split(*data.train),
        validation=Split(*data.val),
        test=Split(*data.test),
        classes=classes,
        origin=origin,
    )


def stdlib(seed: int) -> Splits:
    """Windows of Python's standard library."""
    return corpus_splits(read_corpus(), context=STDLIB_CONTEXT, limit=STDLIB_LIMIT, seed=seed)


_DATA: dict[str, Callable[[int], Splits]] = {
    "mnist1d": mnist1d,
    "digits": digits,
    "stdlib": stdlib,
}
for _name, _settings in read_toml(Path(__file__).with_name("tasks.toml")).items():
    _load = _DATA[_settings.pop("data")]
    register_task(Task(name=_name, load=_load, **_settings))
