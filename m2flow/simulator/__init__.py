"""Simulate a run on a virtual clock: the controller's scheduler with virtual workers, which take as long as real ones would."""
