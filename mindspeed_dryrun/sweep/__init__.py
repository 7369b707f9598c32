"""Variants of one script in one table."""
