"""`python -m fsharding`, and the script of that name: the command line, also under torchrun."""

import sys

from fsharding.apps.cli.starting import hold

__all__ = ["run"]


def run() -> None:
    """Run the command line of this process and exit."""
    hold(sys.argv[1:])
    from fsharding.apps.cli.main import main  # lazy: it takes a while, in which signals may come

    main()


if __name__ == "__main__":
    run()
