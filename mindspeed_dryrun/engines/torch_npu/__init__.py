"""PyTorch with torch_npu, whose own caching allocator counts: the engine of scripts that call `torchrun`."""
