"""The controller: starts and supervises workers, drives the scheduler, and coordinates checkpoints."""
