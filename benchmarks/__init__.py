"""`python -m benchmarks OP`: every backend and every installed peer of an operation, checked first and timed side by side."""
