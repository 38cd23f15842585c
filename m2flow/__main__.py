"""`python -m m2flow` is the command `m2flow`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("m2flow.cli", run_name="__main__", alter_sys=True)
