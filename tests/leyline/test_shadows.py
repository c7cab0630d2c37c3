"""Readings of shadows: pure arrays."""

import torch

from esper.leyline.shadows import MEASURED, ShadowReadings


def measured(where: torch.Tensor, gain: float) -> dict[str, torch.Tensor]:
    names = [name for name in MEASURED if name != "slope"]
    found = {name: torch.full(where.shape, 0.5, dtype=torch.float64) for name in names}
    return found | {"gain": torch.full(where.shape, gain, dtype=torch.float64)}


def test_only_shadows_that_trained_change_and_slopes_are_per_epoch() -> None:
    before = ShadowReadings.none(2, torch.ones(3, 4))
    where = torch.zeros(2, 3, 4, dtype=torch.bool)
    where[1, 2, 3] = True
    half, more = (torch.full((2, 3, 4), each, dtype=torch.float64) for each in (0.5, 1.5))
    once = before.updated(where, half, **measured(where, 0.2))
    twice = once.updated(where, more, **measured(where, 0.3))
    assert float(once.slope[1, 2, 3]) == 0.4  # from nothing, in half an epoch
    assert abs(float(twice.slope[1, 2, 3]) - 0.1) < 1e-12
    assert bool(twice.gain[~where].isnan().all())
    assert not bool(twice.epochs[~where].any())
    assert float(twice.t[1, 2, 3]) == 0.3 / 0.5
    assert bool((twice.t[~where] == -torch.inf).all())


def test_rows_keep_their_readings() -> None:
    where = torch.ones(3, 1, 1, dtype=torch.bool)
    gain = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)[:, None, None]
    found = ShadowReadings.none(3, torch.ones(1, 1)).updated(
        where, torch.ones(3, 1, 1, dtype=torch.float64), **measured(where, 0.0) | {"gain": gain}
    )
    assert found.rows(torch.tensor([2, 0])).gain.flatten().tolist() == [3.0, 1.0]
