"""The command line. Options are plain dataclasses; work is imported only when it is asked for."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from esper import __version__
from esper.karn.commands import every_command
from esper.leyline.errors import EsperError, printable

VERSION_OPTIONS = ("-V", "--version")


def main() -> None:
    """Run the `esper` command.

    `-V` and `--version` are read here: the parser would repeat them below every subcommand.
    """
    words = sys.argv[1:]
    if words[:1] and words[0] in VERSION_OPTIONS:
        print(f"esper {__version__}")
        return
    description = (
        "Esper trains neural networks that grow while they train.\n"
        f"{', '.join(VERSION_OPTIONS)}  print the version and exit"
    )
    run_command("esper", description, words, every_command)


def run_command(
    program: str, description: str, words: Sequence[str], known: Callable[[Sequence[str]], Any]
) -> None:
    """Run what the words ask for; errors made for people are one sentence on stderr."""
    # Before torch is imported: small operations are many times slower with more threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        command = tyro.cli(
            known(words),
            args=words,
            prog=program,
            description=description,
            config=(tyro.conf.CascadeSubcommandArgs,),
        )
        command.run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (EsperError, OSError) as error:  # the disk may be full, or not ours to write to
        said = str(error)
        if isinstance(error, OSError):
            said = f"{error.filename or 'A file'} cannot be read or written: {error.strerror}."
        print(f"esper: {printable(said)}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
