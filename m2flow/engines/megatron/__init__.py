"""Train over tensor, pipeline, context, expert and data parallel ranks with Megatron-core."""
