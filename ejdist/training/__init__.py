"""Training: step, loop, optimizer, checkpoints, data, metrics."""
