"""What engines share of a Hugging Face model: loading, packing, adapters, optimiser, checkpoints."""

import logging

for _name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao where it is, which tells of kernels that nobody asked for.
    logging.getLogger(_name).setLevel(logging.ERROR)
