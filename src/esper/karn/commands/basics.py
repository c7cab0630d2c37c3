"""Commands that show what there is."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from esper import __version__


@dataclass(frozen=True, kw_only=True)
class Life:
    """Watch a seed's whole life: planted, trained in isolation, blended, made permanent; a second
    one is pruned again. Trains a small network on MNIST-1D, which is generated on the spot."""

    epochs: int = 20
    """epochs to train; the story needs at least 16"""
    seed: int = 0
    """every random number follows from it"""
    samples: int = 4000
    """training samples to generate"""

    def run(self) -> None:
        from esper.karn.life import tell_life

        tell_life(epochs=self.epochs, seed=self.seed, samples=self.samples)


@dataclass(frozen=True, kw_only=True)
class Blueprints:
    """List what can be planted in a host, and what each seed costs in each slot."""

    host: Annotated[str, tyro.conf.arg(metavar="NAME")] = "conv1d"
    """conv1d, conv2d, mlp or gpt"""

    def run(self) -> None:
        from esper.karn.blueprints import show_blueprints

        show_blueprints(self.host)


@dataclass(frozen=True, kw_only=True)
class Version:
    """Print the version."""

    def run(self) -> None:
        print(f"esper {__version__}")
