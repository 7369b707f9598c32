"""The fastest parallel strategy that fits."""
