"""Run the command `m2flow` by `python -m m2flow.cli`."""

from m2flow.cli.main import main

if __name__ == "__main__":
    main()
