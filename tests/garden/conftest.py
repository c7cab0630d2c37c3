"""Short epochs, so that whole episodes are quick; nothing tested here depends on their length."""

import pytest

from tests.garden.plots import BATCHES


@pytest.fixture(autouse=True)
def _short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.garden.episodes.GARDEN_BATCHES", BATCHES)
