"""`python -m esper`, as `torchrun … -m esper` calls it."""

from esper.karn.cli import main

if __name__ == "__main__":
    main()
