"""Random shifts and flips of images, on the device where they are trained on.

Shapes: `N` environments, `B` images of a batch, `C` channels, `H` rows, `W` columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.errors import DataError
from esper.tolaria.shuffle import uniform

DRAWS = 3  # for each image: rows to move, columns to move, flip or not


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How far images may move, and whether they may be mirrored left to right."""

    shift: int = 0  # points, up, down, left or right
    flip: bool = False

    def __post_init__(self) -> None:
        if self.shift < 0:
            raise DataError("Images cannot move by less than nothing", given=self.shift, valid="0…")

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
        draws = uniform(seeds, "augment", step, B * DRAWS, images.device).view(N, B, DRAWS)
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
