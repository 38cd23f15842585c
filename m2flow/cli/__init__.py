"""The command line `m2flow`: one module for each command or family of commands."""
