"""What processors can compute in few bits."""

import pytest
import torch
from torch import nn


def _lstm_in_bfloat16() -> bool:
    """torch has an LSTM in bfloat16 for some processors only."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError:
        return False
    return True


NARROW_LSTM = pytest.mark.skipif(
    not _lstm_in_bfloat16(), reason="torch has no LSTM in bfloat16 for this processor"
)
