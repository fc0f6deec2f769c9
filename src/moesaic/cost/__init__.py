"""What a run costs: parameters, FLOPs, bytes, memory and time. No torch."""
