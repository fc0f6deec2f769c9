"""The decoder: attention, router, experts, losses."""
