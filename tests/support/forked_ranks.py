"""What the process has loaded that ranks of tests are forked from: the code of their models."""

from transformers.models.qwen2 import modeling_qwen2  # noqa: F401
