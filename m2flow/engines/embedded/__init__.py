"""The engines that run inside m2flow's own worker: continuous batching, and a trainer of one process."""
