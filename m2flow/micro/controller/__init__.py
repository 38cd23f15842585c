"""The controller's process: scheduler, launchers, supervisor, checkpoints."""
