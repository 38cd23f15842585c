"""The engines that run in m2flow's own worker: continuous batching and a trainer of one process."""
