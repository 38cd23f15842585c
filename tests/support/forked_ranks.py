"""What the process has loaded that ranks of tests are forked from: the code of their models."""

import gc

gc.disable()  # Nothing of what is loaded is garbage; to look for it takes a third of the time. Ranks collect again.

from transformers.models.qwen2 import modeling_qwen2  # noqa: E402, F401
