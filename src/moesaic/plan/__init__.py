"""Which layout to run: search, what was published, and launch files for other stacks. No torch."""
