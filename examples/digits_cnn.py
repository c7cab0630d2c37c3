"""A small convolutional network on handwritten digits: grow, stop, go on, and write it as Python.

    python examples/digits_cnn.py

The 1,797 digits are shipped with Esper. The run is kept in a folder, so it can be interrupted at
any time and goes on as if nothing had happened; the grown network ends as one readable file that
needs torch alone.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import esper
from esper.api import GrownRun
from esper.kasmina import export_python


class DigitNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.conv2 = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:  # [B, 1, 8, 8]
        x = self.pool(self.conv1(x))
        return self.head(self.conv2(x).mean((2, 3)))


def main(folder: Path, epochs: int = 20, samples: int = 1200) -> GrownRun:
    train, val, _ = esper.datasets.digits()
    train = (train[0][:samples], train[1][:samples])

    def interrupt(record: dict[str, object]) -> None:
        if record["epoch"] == epochs // 2:
            raise KeyboardInterrupt  # or Ctrl-C, a crash, a power cut

    torch.manual_seed(0)
    try:
        esper.grow(
            DigitNet(),
            train,
            val,
            loss="cross_entropy",
            budget=esper.Budget(params="+30%", epochs=epochs),
            slots=["conv1", "conv2"],
            lr=5e-3,
            out=folder / "run",
            on_epoch=interrupt,
        )
    except KeyboardInterrupt:
        print(f"stopped after epoch {epochs // 2}")
    run = esper.resume(folder / "run", DigitNet(), train, val)
    print(run.report())
    written = export_python(run.host, run.sample, folder / "digits")
    print(f"{written.path}/model.py differs from the grown network by {written.difference:g}")
    return run


if __name__ == "__main__":
    main(Path(tempfile.mkdtemp(prefix="digits-")))
