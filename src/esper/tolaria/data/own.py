"""Your own `Dataset` or `DataLoader` as splits that live on the training device.

    splits = splits_from(dataset)                         # shares are held out at random
    splits = splits_from(train_loader, test=test_loader)  # validation is held out of `train`

Items are pairs `(input, label)` of tensors, arrays or numbers. Each source is read once, as it
stands, and is from then on only shuffled by Esper: transforms that draw at random are frozen.
"""

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from esper.leyline.errors import DataError
from esper.leyline.streams import derive_seed
from esper.tolaria.data.splits import TEST_SHARE, VALIDATION_SHARE, Split, Splits

Source = Dataset[object] | DataLoader[object]

READ_BATCH = 256  # samples of a data set that are read and joined at a time


def splits_from(
    train: Source,
    *,
    validation: float | Source = VALIDATION_SHARE,
    test: float | Source = TEST_SHARE,
    seed: int = 0,
    classes: int | None = None,
    origin: str | None = None,
) -> Splits:
    """Read data sets or loaders whole; `validation` and `test` may be shares of `train`."""
    inputs, labels = _read("train", train, seed)
    return Splits.from_tensors(
        inputs,
        labels,
        validation=_read_or_share("validation", validation, seed),
        test=_read_or_share("test", test, seed),
        seed=seed,
        classes=classes,
        origin=origin or type(train).__name__,
    )


def _read_or_share(name: str, part: float | Source, seed: int) -> float | Split:
    return part if isinstance(part, float | int) else _read(name, part, seed)


def _read(name: str, source: Source, seed: int) -> Split:
    if not isinstance(source, Dataset | DataLoader):
        raise DataError(
            f"Cannot read {name} data",
            given=type(source).__name__,
            valid="a torch Dataset or DataLoader",
            fix="for tensors use Splits.from_tensors(inputs, labels)",
        )
    loader = source if isinstance(source, DataLoader) else DataLoader(source, READ_BATCH)
    # A loader that shuffles draws from torch's global stream: seeded here, it gives the same
    # order every time, and the caller's stream is left where it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "read", name))
        try:
            pairs = [_pair(name, batch) for batch in loader]
            inputs = torch.cat([pair[0] for pair in pairs])
            labels = torch.cat([pair[1] for pair in pairs])
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"The {name} data cannot be joined into two tensors",
                given=str(error).splitlines()[0],
                valid="at least one pair (input, label), all of one shape and type",
            ) from error
    return Split(inputs, labels if labels.is_floating_point() else labels.long())


def _pair(name: str, batch: object) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise DataError(
            f"The {name} data does not hold pairs",
            given=f"{type(batch).__name__}{size}",
            valid="(input, label)",
            fix="give the loader a collate_fn that returns that pair",
        )
    inputs, labels = (torch.as_tensor(part).detach().cpu() for part in batch)
    return inputs, labels
