"""The schedule of a run as columns: read once, followed while the run goes on, and cut to what a window on a screen can show."""
