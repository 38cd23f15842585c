"""Move samples and weights between processes: codec, ZeroMQ, shared memory, torch.distributed groups, weight publication."""
