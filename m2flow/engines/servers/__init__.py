"""Rollout engines whose work an inference server does: SGLang and vLLM."""
