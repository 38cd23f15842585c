"""Bytes between processes: codec, ZeroMQ, shared memory, process groups."""
