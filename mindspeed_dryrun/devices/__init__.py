"""Devices as data: one YAML file for each kind of card, with its memory and its speed, and where each figure is from."""
