"""A worker's process: its tasks, its engines, its weights."""
