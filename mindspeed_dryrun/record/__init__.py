"""The record: run directory, rank logs and memory tracker files, read into dataclasses."""
