"""What the process has loaded that ranks of Megatron's tests are forked from."""

import forked_ranks  # noqa: F401
import megatron_on_cpu  # noqa: F401
from transformers.models.deepseek_v2 import modeling_deepseek_v2  # noqa: F401
from transformers.models.deepseek_v3 import modeling_deepseek_v3  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.mixtral import modeling_mixtral  # noqa: F401
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401

from m2flow.engines.megatron import library

library.core()
