"""What environments are fed: images move and flip, each by its own draw."""

import pytest
import torch

from esper.leyline.errors import DataError
from esper.tolaria.feed import Augmentation, Feed
from esper.tolaria.population import Population
from tests.tolaria.test_random_streams import Count
from tests.tolaria.twins import HOSTS, make_splits

SEEDS = torch.arange(10, 13)
IMAGES = 1 + torch.rand(3, 40, 2, 6, 5, generator=torch.Generator().manual_seed(0))


def moved(image: torch.Tensor, down: int, right: int, flip: bool) -> torch.Tensor:
    """One image [C, H, W], moved the slow way."""
    if flip:
        image = image.flip(-1)
    result = torch.zeros_like(image)
    _, height, width = image.shape
    for row in range(height):
        for column in range(width):
            y, x = row - down, column - right
            if 0 <= y < height and 0 <= x < width:
                result[:, row, column] = image[:, y, x]
    return result


def test_every_image_is_a_shift_or_flip_of_itself_and_all_of_them_occur() -> None:
    result = Augmentation(shift=1, flip=True)(IMAGES, SEEDS, 0)
    seen = set()
    for before, after in zip(IMAGES.flatten(0, 1), result.flatten(0, 1), strict=True):
        ways = [
            (down, right, flip)
            for down in (-1, 0, 1)
            for right in (-1, 0, 1)
            for flip in (False, True)
            if torch.equal(moved(before, down, right, flip), after)
        ]
        assert len(ways) == 1
        seen.update(ways)
    assert len(seen) == 18


def test_nothing_moves_unless_it_may() -> None:
    assert torch.equal(Augmentation()(IMAGES, SEEDS, 0), IMAGES)
    flipped = Augmentation(flip=True)(IMAGES, SEEDS, 0)
    whole = (flipped == IMAGES).flatten(2).all(2)
    assert torch.equal(torch.where(whole[:, :, None, None, None], IMAGES, IMAGES.flip(-1)), flipped)
    assert 0.3 < float(whole.double().mean()) < 0.7


def test_an_environment_is_augmented_the_same_in_any_population() -> None:
    augment = Augmentation(shift=2, flip=True)
    together = augment(IMAGES, SEEDS, 4)
    for row in range(3):
        alone = augment(IMAGES[row : row + 1], SEEDS[row : row + 1], 4)
        assert torch.equal(alone[0], together[row])
    assert not torch.equal(together, augment(IMAGES, SEEDS, 5))
    steps = torch.tensor([4, 5, 4])
    assert torch.equal(augment(IMAGES, SEEDS, steps)[2], together[2])
    assert not torch.equal(augment(IMAGES, SEEDS, steps)[1], together[1])


def test_a_shift_larger_than_the_image_empties_some() -> None:
    result = Augmentation(shift=20)(IMAGES, SEEDS, 0)
    assert result.isfinite().all()
    assert (result.flatten(2).sum(2) == 0).any()


def test_a_larger_population_needs_no_more_operations() -> None:
    image, seed = IMAGES[:1], SEEDS[:1]
    with Count() as alone:
        Augmentation(shift=2, flip=True)(image, seed, 0)
    with Count() as many:
        Augmentation(shift=2, flip=True)(IMAGES, SEEDS, 0)
    assert many.operations == alone.operations


def test_images_without_environments_are_refused() -> None:
    with pytest.raises(DataError, match=r"images \[N, B, C, H, W\]"):
        Augmentation()(IMAGES[0], SEEDS, 0)
    with pytest.raises(DataError, match="one seed for each environment"):
        Augmentation()(IMAGES, SEEDS[:2], 0)
    with pytest.raises(DataError, match="'shift', is out of range"):
        Augmentation(shift=-1)


def test_augmentation_differs_by_environment_and_batch_and_repeats_with_the_run() -> None:
    def batches(count: int) -> torch.Tensor:
        feed = Feed(
            [make_splits("conv2d")],
            [0] * count,
            batch=4,
            batches=3,
            augmentation=Augmentation(shift=2, flip=True),
        )
        population = Population(HOSTS["conv2d"], feed, identities=range(count))
        order = feed.epoch(population.seeds, population.lifecycle.epoch)
        same = order[:1].expand(3, -1, -1)  # the same samples three times
        return torch.stack([feed.fetch(index)[0] for index in same])

    few, many = batches(2), batches(5)
    assert torch.equal(few, many[:, :2])
    assert not torch.equal(few[0], few[1])
    assert not torch.equal(few[:, 0], few[:, 1])
