"""Short epochs, so that whole rounds are quick; nothing tested here depends on their length."""

from collections.abc import Iterator

import pytest

from tests.simic.training.tiny import BATCHES


@pytest.fixture(autouse=True, scope="module")
def _short_epochs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.garden.episodes.GARDEN_BATCHES", BATCHES)
        yield
