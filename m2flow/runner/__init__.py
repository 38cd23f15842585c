"""Run a flow from beginning to end, or a few of its steps to measure them."""
