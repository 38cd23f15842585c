"""What engines share of a Hugging Face model: loading, packing, adapters, optimiser, checkpoints."""
