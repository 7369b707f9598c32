"""Sweep and search: many variants of one job through the same dry run, one table; the best strategy under a budget."""
