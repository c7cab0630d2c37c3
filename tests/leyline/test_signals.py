"""What signals remember: one wrapped model is a population of one."""

import torch
from torch import Tensor

from esper.leyline.signals import FLOW_STATISTICS, SERIES, SIGNAL_WINDOW, SignalWindow

HOSTS, SLOTS, EPOCHS = 5, 3, SIGNAL_WINDOW + 4


def played(rows: list[int]) -> SignalWindow:
    """These rows of one story, in which some rows fail and one begins anew."""
    chance = torch.Generator().manual_seed(0)
    window = SignalWindow(len(rows), SLOTS)

    def draw(*shape: int) -> Tensor:
        return torch.rand((HOSTS, *shape), generator=chance, dtype=torch.float64)[rows]

    for epoch in range(EPOCHS):
        good = draw() > 0.2
        window.remember({name: draw() for name in SERIES}, draw(), good)
        window.remember_flow(draw(SLOTS, len(FLOW_STATISTICS)), good)
        if epoch == 6 and 2 in rows:
            window.clear(torch.tensor([rows.index(2)]))
    return window


def test_a_row_on_its_own_remembers_what_it_remembers_among_others() -> None:
    together = played(list(range(HOSTS))).state_dict()
    for row in range(HOSTS):
        alone = played([row]).state_dict()
        assert alone.keys() == together.keys()
        for name, array in alone.items():
            assert torch.equal(array.nan_to_num(-1.0), together[name][[row]].nan_to_num(-1.0))


def test_a_loss_rises_from_the_last_epoch_on_and_only_where_there_was_one() -> None:
    window = SignalWindow(3, SLOTS)
    assert bool(window.loss_rise(torch.ones(3)).isnan().all())
    loss = torch.tensor([2.0, 0.0, torch.nan], dtype=torch.float64)
    window.remember(dict.fromkeys(SERIES, loss), loss)
    rise = window.loss_rise(torch.tensor([3.0, 3.0, 3.0], dtype=torch.float64))
    assert rise[0] == 0.5
    assert bool(rise[1:].isnan().all())
