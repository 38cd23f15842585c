"""Run, plan and simulate flows from Python, and read runs as tables, models and pictures; the command line calls the same functions."""
