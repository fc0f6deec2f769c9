"""Measurements of moesaic beside other MoE stacks on one machine; `docs/benchmarks.md` says how to read them."""
