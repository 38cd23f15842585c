"""What the process has loaded that ranks of tests are forked from: the code of their models."""

from gloo_device import share_a_device
from transformers.models.qwen2 import modeling_qwen2  # noqa: F401

share_a_device()
