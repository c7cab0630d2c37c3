"""`python -m studies c1 | c2 | report`."""

import sys

from esper.karn.cli import run_command
from studies.commands import Asked

run_command(
    "python -m studies",
    "Find out whether growth pays (c1) and whether learning to grow pays (c2); write it up.",
    sys.argv[1:],
    lambda words: Asked,
)
