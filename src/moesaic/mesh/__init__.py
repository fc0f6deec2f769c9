"""Ranks, process groups and the device: where a layout meets the machine."""
