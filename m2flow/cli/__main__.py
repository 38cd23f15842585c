"""`python -m m2flow.cli` is the command `m2flow`."""

from m2flow.cli.main import main

if __name__ == "__main__":
    main()
