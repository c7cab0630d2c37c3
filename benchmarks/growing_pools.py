"""Images and text for `growing_tasks.py`, taken from pools of a fixed size.

So every machine draws from the same: from files that are there, or from what `--pack` has put into
a folder. There are two pools of each that share nothing, a first and a second.

Shapes: `M` samples, `T` positions.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from _report import ROOT  # noqa: F401  # lets it import studies
from torch import Tensor

from esper.datasets.handwritten import DIGITS_FILE
from esper.leyline.streams import derive_seed
from esper.tolaria.data.corpus import Corpus, corpus_splits, read_corpus
from esper.tolaria.data.splits import Split, Splits
from studies.image_files import FASHION_MNIST, IDX_FILES, image_splits, read_idx

POOLED_IMAGES = {"train": (slice(10_000), slice(20_000, 30_000)),
                 "test": (slice(4_000), slice(5_000, 9_000))}  # fmt: skip
POOLED_BYTES = 2_000_000
FIRST, SECOND = 0, 1  # pools
CONTEXT = 32  # bytes of a window

Data = dict[str, tuple[Tensor, Tensor]]  # inputs and targets by split
Counts = Mapping[str, int]


def digits(flat: bool, seed: int, samples: Counts, packed: Path | None) -> Data:
    """[M, 1, 8, 8], or [M, 64], of the 1,797 that are shipped; test data do not depend on seeds."""
    with np.load(DIGITS_FILE, allow_pickle=False) as stored:
        images, labels = (torch.from_numpy(stored[name]) for name in ("images", "labels"))
    shares = {"validation": 0.2, "test": 0.3}
    splits = image_splits(
        images.unsqueeze(1), labels, shares=shares, seed=seed, origin="handwritten digits"
    )
    found = _rows(splits, seed, samples)
    if flat:
        return {name: (inputs.flatten(1), labels) for name, (inputs, labels) in found.items()}
    return found


def clothes(pool: int, seed: int, samples: Counts, packed: Path | None) -> Data:
    """[M, 1, 28, 28]"""
    found = clothes_pool(packed, pool)
    whole = Split(found["images"], found["labels"])
    test = Split(found["test"], found["test_labels"])
    splits = image_splits(
        whole.inputs, whole.labels, shares={"validation": 0.2}, test=test, seed=seed,
        origin=FASHION_MNIST.title,
    )  # fmt: skip
    return _rows(splits, seed, samples)


@cache
def clothes_pool(packed: Path | None, pool: int = FIRST) -> dict[str, Tensor]:
    """Some images of Fashion-MNIST, as bytes."""
    if packed is not None:
        with np.load(packed / packed_file("clothes", pool), allow_pickle=False) as stored:
            return {name: torch.from_numpy(stored[name]) for name in stored.files}
    paths = FASHION_MNIST.find([(name, f"{name}.gz") for name in IDX_FILES])
    axes = (3, 1, 3, 1)
    found = [
        read_idx(FASHION_MNIST, path, count)[POOLED_IMAGES[part][pool]]
        for path, count, part in zip(paths, axes, ("train", "train", "test", "test"), strict=True)
    ]
    images, labels, test, test_labels = found
    return {
        "images": images.unsqueeze(1), "labels": labels,
        "test": test.unsqueeze(1), "test_labels": test_labels,
    }  # fmt: skip


def text(pool: int, seed: int, samples: Counts, packed: Path | None) -> Data:
    """Windows [M, T] of bytes, and of the bytes after them."""
    corpus = text_pool(packed, pool)
    splits = corpus_splits(corpus, context=CONTEXT, limit=corpus.size, seed=seed)
    return _rows(splits, seed, samples)


@cache
def text_pool(packed: Path | None, pool: int = FIRST) -> Corpus:
    """Some files of Python's standard library, in an order of chance."""
    if packed is not None:
        with np.load(packed / packed_file("text", pool), allow_pickle=False) as stored:
            names = stored["names"].tobytes().decode().split("\n")
            ends, content = stored["ends"].tolist(), stored["content"].tobytes()
            title, sha256 = stored["origin"].tobytes().decode().split("\n")
        starts = [0, *ends[:-1]]
        files = [content[start:end] for start, end in zip(starts, ends, strict=True)]
        return Corpus(title=title, files=tuple(zip(names, files, strict=True)), sha256=sha256)
    whole, taken = read_corpus(), set[str]()
    for _ in range(pool + 1):
        files, size = [], 0
        for name, content in sorted(whole.files, key=lambda file: derive_seed("pool", file[0])):
            if name not in taken and size + len(content) <= POOLED_BYTES:
                files.append((name, content))
                size += len(content)
        taken |= {name for name, _ in files}
    return Corpus(title=whole.title, files=tuple(sorted(files)), sha256=whole.sha256)


def packed_file(name: str, pool: int) -> str:
    return f"{name}.npz" if pool == FIRST else f"{name}-{pool + 1}.npz"


def pack(folder: Path) -> None:
    """Put what other machines may not have into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for pool in (FIRST, SECOND):
        images = {name: tensor.numpy() for name, tensor in clothes_pool(None, pool).items()}
        np.savez_compressed(folder / packed_file("clothes", pool), allow_pickle=False, **images)
        corpus = text_pool(None, pool)
        contents = [content for _, content in corpus.files]
        words = {"names": "\n".join(name for name, _ in corpus.files)}
        words["origin"] = f"{corpus.title}\n{corpus.sha256}"
        np.savez_compressed(
            folder / packed_file("text", pool),
            allow_pickle=False,
            ends=np.cumsum([len(content) for content in contents]),
            content=np.frombuffer(b"".join(contents), np.uint8),
            **{name: np.frombuffer(value.encode(), np.uint8) for name, value in words.items()},
        )


def _rows(splits: Splits, seed: int, samples: Counts) -> Data:
    """Some rows of each split; those of the test split are chosen without the seed."""
    parts = {}
    for name, split in splits.named().items():
        stream = derive_seed(0 if name == "test" else seed, "rows", name)
        order = torch.randperm(split.samples, generator=torch.Generator().manual_seed(stream))
        parts[name] = tuple(split.take(order[: samples[name]]))
    return parts
