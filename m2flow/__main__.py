"""`python -m m2flow` is the command `m2flow`."""

import importlib

if __name__ == "__main__":
    importlib.import_module("m2flow.cli.main").main()  # By name: the package itself stands below its command line.
