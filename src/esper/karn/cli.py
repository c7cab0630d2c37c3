"""The command line. Options are plain dataclasses; work is imported only when it is asked for."""

import os
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from esper import __version__


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Watch a seed's whole life: planted, trained in isolation, blended, made permanent; a second
    one is pruned again. Trains a small network on MNIST-1D, which is generated on the spot."""

    epochs: int = 20
    """epochs to train; the story needs at least 16"""
    seed: int = 0
    """every random number follows from it"""
    samples: int = 4000
    """training samples to generate"""

    def run(self) -> None:
        from esper.karn.demo import run_demo

        run_demo(epochs=self.epochs, seed=self.seed, samples=self.samples)


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


Command = Demo | Blueprints | Version


def main() -> None:
    """Run a command; errors made for people are one sentence on stderr."""
    try:
        _run()
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def _run() -> None:
    command: Command = tyro.cli(
        Command,
        prog="esper",
        description="Esper trains neural networks that grow while they train.",
    )
    from esper.leyline.errors import EsperError

    try:
        command.run()
    except EsperError as error:
        print(f"esper: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
