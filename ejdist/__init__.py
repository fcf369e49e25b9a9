"""The operations of `kernels` on sharded arrays, and training with them."""
