"""What a Megatron training job is: its arguments, flags, layout, sizes and what Megatron refuses. Standard library only."""
