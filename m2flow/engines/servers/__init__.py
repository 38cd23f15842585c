"""Rollout engines that delegate to an inference server: SGLang and vLLM."""
