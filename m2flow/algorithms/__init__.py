"""Advantages, losses and KL estimates: pure functions on tensors."""
