"""The trainer: data, optimizer, checkpoints, metrics and the loop."""
