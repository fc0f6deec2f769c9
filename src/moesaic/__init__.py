"""moesaic plans, trains, measures and rebalances mixture-of-experts language models."""

__version__ = "0.1.0"
