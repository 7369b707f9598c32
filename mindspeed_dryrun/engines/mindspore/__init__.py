"""MindSpore in simulation: the engine of scripts that call `msrun`."""
