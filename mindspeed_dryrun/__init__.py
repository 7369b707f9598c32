"""Dry runs of MindSpeed-LLM training scripts: every rank's peak memory, no NPU needed."""

__version__ = "0.1.0"
