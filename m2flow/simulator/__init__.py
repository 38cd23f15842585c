"""A run on a virtual clock: the scheduler that the controller runs, and workers that only take as long as real ones would."""
