"""Measure and improve a run: what this machine can do, and which setting to change next."""
