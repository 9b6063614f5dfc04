"""`python -m fsharding`: the command line, also under torchrun."""

from fsharding.cli.main import main

if __name__ == "__main__":
    main()
