"""What a run came to: why its devices were idle, what its steps waited for, and how far they were from the best that could be."""
