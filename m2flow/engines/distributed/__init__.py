"""Trainers of several ranks: FSDP2 and DeepSpeed."""
