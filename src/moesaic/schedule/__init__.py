"""The order of work: micro-batches and the pipeline."""
