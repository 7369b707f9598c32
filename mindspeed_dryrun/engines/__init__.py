"""What counts the memory of a rank: what is installed, the environment of a rank, how figures are read."""
