"""Splits of images are standardised with the statistics of train."""

import torch

from esper.tolaria.data.splits import Split
from studies.image_files import image_splits


def drawn(samples: int, seed: int) -> Split:
    source = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (samples, 2, 5, 4), generator=source, dtype=torch.uint8)
    images[:, 1] //= 8
    return Split(images, torch.randint(3, (samples,), generator=source, dtype=torch.uint8))


def test_images_are_standardised_with_statistics_of_train() -> None:
    train, test = drawn(60, 0), drawn(20, 1)
    made = image_splits(
        *train, shares={"validation": 0.25}, test=test, classes=3, seed=0, origin="drawn"
    )
    assert [part.samples for part in made.named().values()] == [45, 15, 20]
    torch.testing.assert_close(made.train.inputs.mean((0, 2, 3)), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(made.train.inputs.std((0, 2, 3), correction=0), torch.ones(2))
    brighter = Split(test.inputs // 2, test.labels)
    other = image_splits(
        *train, shares={"validation": 0.25}, test=brighter, classes=3, seed=0, origin="drawn"
    )
    assert torch.equal(made.train.inputs, other.train.inputs)
    assert torch.equal(made.validation.inputs, other.validation.inputs)
