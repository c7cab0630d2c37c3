"""The feed: every environment's own data, on the training device, in its own order, augmented.

Shapes: `N` environments, `B` batch, `T` batches of an epoch, `V` rows of a pass, `M` samples; of
images `C` channels, `H` rows, `W` columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.errors import DataError
from esper.leyline.settings import COUNT, WHOLE, require
from esper.tolaria.data.splits import Split, Splits
from esper.tolaria.random_streams import orders, uniform

# Inputs of a validation pass that are worked on together, at most: enough to fill the device.
ELEMENTS_AT_ONCE = {"cpu": 2**22, "cuda": 2**26}

SPLITS = ("train", "validation", "test")
DRAWS = 3  # for each image: rows to move, columns to move, flip or not


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How far images may move, and whether they may be mirrored left to right."""

    shift: int = 0  # points, up, down, left or right
    flip: bool = False

    def __post_init__(self) -> None:
        require("How far images move, 'shift',", self.shift, WHOLE, error=DataError)

    def __call__(self, images: Tensor, seeds: Tensor, step: int | Tensor) -> Tensor:
        """Images [N, B, C, H, W], each moved and flipped by its own draw; what is new is 0.

        `step` counts batches. Standardised images have mean 0, so 0 is the neutral value.
        """
        if images.ndim != 5 or len(seeds) != len(images):
            raise DataError(
                "Augmentation needs images and one seed for each environment",
                given=f"images {list(images.shape)}, seeds {list(seeds.shape)}",
                valid="images [N, B, C, H, W], seeds [N]",
            )
        N, B, C, H, W = images.shape
        draws = uniform(seeds.to(images.device), "augment", step, B * DRAWS).view(N, B, DRAWS)
        moves = (draws[..., :2] * (2 * self.shift + 1)).long() - self.shift
        row = torch.arange(H, device=images.device) + moves[..., :1]  # [N, B, H]
        column = torch.arange(W, device=images.device) + moves[..., 1:]  # [N, B, W]
        inside = ((row >= 0) & (row < H))[..., None] & ((column >= 0) & (column < W))[..., None, :]
        if self.flip:
            column = torch.where(draws[..., 2:] < 0.5, W - 1 - column, column)
        source = row.clamp(0, H - 1)[..., None] * W + column.clamp(0, W - 1)[..., None, :]
        flat = source.view(N, B, 1, H * W).expand(-1, -1, C, -1)
        moved = images.reshape(N, B, C, H * W).gather(3, flat).view_as(images)
        return moved.where(inside[:, :, None], 0.0)


class Feed:
    """Batches for N environments; several may share a data set."""

    def __init__(
        self,
        datasets: Sequence[Splits],
        assignment: Sequence[int],
        *,
        batch: int = 50,
        batches: int = 40,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        augmentation: Augmentation | None = None,
    ) -> None:
        for what, given in (("data sets", datasets), ("environments", assignment)):
            require(f"The number of {what} of a feed", len(given), COUNT, error=DataError)
        _require_alike(datasets)
        self.device = torch.device(device)
        self.batch, self.batches, self.environments = batch, batches, len(assignment)
        self.classes = max(each.classes for each in datasets)
        self.augmentation = augmentation
        # What augmentation draws from: kept on the device, so that a captured step moves it on.
        self._streams = torch.zeros(len(assignment), dtype=torch.int64, device=self.device)
        self._moment = torch.zeros_like(self._streams)
        self.assignment = torch.zeros(len(assignment), dtype=torch.int64)
        self._data: dict[str, Split] = {}
        self._starts: dict[str, Tensor] = {}  # [data sets] where each one's samples start
        self._counts: dict[str, Tensor] = {}  # [data sets]
        self._first: dict[str, Tensor] = {}  # [N] where each environment's samples start
        for name in SPLITS:
            splits = [each.named()[name] for each in datasets]
            counts = torch.tensor([split.samples for split in splits])
            self._starts[name], self._counts[name] = counts.cumsum(0) - counts, counts
            inputs, labels = (torch.cat(each).to(self.device) for each in zip(*splits, strict=True))
            inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
            self._data[name] = Split(inputs, labels)
            self._first[name] = torch.zeros_like(self._streams)
        self.assign(torch.arange(len(assignment)), torch.tensor(list(assignment)))

    def assign(self, environments: Tensor, datasets: Tensor) -> None:
        """From now on these environments [K] learn from these data sets [K], by index."""
        known = len(self._starts["train"])
        if bool(((datasets < 0) | (datasets >= known)).any()):
            raise DataError(
                "An environment was given a data set that the feed does not hold",
                given=datasets.tolist()[:8],
                valid=f"0 to {known - 1}",
            )
        self.assignment[environments] = datasets
        there = environments.to(self.device)
        for name in SPLITS:
            self._first[name][there] = self._starts[name][datasets].to(self.device)

    def samples(self, split: str) -> Tensor:
        """[N]: how many samples each environment has."""
        return self._counts[split][self.assignment]

    def epoch(self, seeds: Tensor, epochs: Tensor) -> Tensor:
        """Which samples each batch of an epoch takes, [T, N, B]; smaller data sets are cycled."""
        if self.augmentation is not None:
            self._streams.copy_(seeds)
            self._moment.copy_(epochs * self.batches)
        counts, needed = self.samples("train"), self.batch * self.batches
        if bool((counts == counts[0]).all()):
            chosen = orders(seeds, epochs, int(counts[0]), needed, self.device)
        else:
            chosen = torch.empty(len(counts), needed, dtype=torch.int64, device=self.device)
            for samples in counts.unique().tolist():
                rows = (counts == samples).nonzero()[:, 0]
                own = orders(seeds[rows], epochs[rows], samples, needed, self.device)
                chosen[rows.to(self.device)] = own
        chosen = chosen + self._first["train"][:, None]
        return chosen.view(self.environments, self.batches, self.batch).transpose(0, 1).contiguous()

    def fetch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The next batch of every environment, augmented: samples [N, B] of the present epoch."""
        batch = self.peek(index)
        if self.augmentation is not None:
            self._moment += 1
        return batch

    def peek(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """What `fetch` would give now, without moving on."""
        inputs, labels = self.samples_at(index)
        if self.augmentation is not None:
            inputs = self.augmentation(inputs, self._streams, self._moment)
        return inputs, labels

    def samples_at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Training inputs and labels as they are, for sample numbers of any shape."""
        return self._data["train"].take(index)

    def stored(self, split: str) -> tuple[Split, Tensor]:
        """Every sample of a split as it is kept, and where those of each environment begin, [N]."""
        return self._data[split], self._first[split]

    def first_samples(self, split: str, count: int) -> Tensor:
        """Inputs [N, count, ...]: the first of every environment, or as many as there are."""
        count = min(count, int(self.samples(split).min()))
        index = self._first[split][:, None] + torch.arange(count, device=self.device)
        return self._data[split].inputs[index]

    def held_out(self, split: str, environment: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples of a split for rows of these environments, in chunks that fit."""
        most = int(self.samples(split)[0])
        first = self._first[split][environment.to(self.device)]
        size = self._data[split].inputs[0].numel()
        limit = ELEMENTS_AT_ONCE[self.device.type]
        chunk = max(1, min(most, limit // max(1, size * len(environment))))
        for start in range(0, most, chunk):
            offset = torch.arange(start, min(start + chunk, most), device=self.device)
            yield self._data[split].take(first[:, None] + offset)


def _require_alike(datasets: Sequence[Splits]) -> None:
    """One population computes on all of them at once, so their shapes must be the same."""
    first = datasets[0]
    for other in datasets[1:]:
        for name in SPLITS:
            ours, theirs = first.named()[name], other.named()[name]
            same_shape = ours.inputs.shape[1:] == theirs.inputs.shape[1:]
            if not same_shape or (name != "train" and ours.samples != theirs.samples):
                raise DataError(
                    f"Data sets of one population differ in their {name} split",
                    given=f"{list(ours.inputs.shape)} and {list(theirs.inputs.shape)}",
                    valid="samples of one shape, and equally many to validate and to test on",
                    fix="cut them to the same sizes",
                )
