"""Analyse a run from its records, compare runs, and show them as pages in the browser."""
