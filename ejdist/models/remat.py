"""What a layer keeps for its backward, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable

import jax

# The names that attention gives to what its backward needs (see kernels/_core/execute.py).
ATTENTION = ("flash_attention.out", "flash_attention.lse")
LAYER_INPUT = "decoder.layer_input"

# Name -> what is kept of each layer beside its input.
REMAT_POLICIES = {
    "none": "everything: no recomputation, most memory",
    "dots": "results of the projections, and attention's output and lse: norms, rotations and the like are done again",
    "attention": "attention's output and lse: matmuls are done again, attention never is",
    "offload": "as attention, with layer inputs and attention's outputs in the host's memory until the backward",
    "full": "nothing: everything is done again, attention too; least memory",
}


def rematerialised(function: Callable, policy: str) -> Callable:
    """Returns the function under a remat policy of `REMAT_POLICIES`.

    Raises:
      ValueError: no such policy.
    """
    policies = jax.checkpoint_policies
    if policy not in REMAT_POLICIES:
        raise ValueError(f"model.remat = {policy!r} is unknown; use one of {', '.join(REMAT_POLICIES)}")
    if policy == "none":
        return function
    if policy == "full":
        return jax.checkpoint(function)
    attention = policies.save_only_these_names(*ATTENTION)
    if policy == "dots":
        return jax.checkpoint(
            function, policy=policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, attention)
        )
    if policy == "attention":
        return jax.checkpoint(function, policy=attention)
    return jax.checkpoint(
        function,
        policy=policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["flash_attention.lse"],  # small: a number per query and head
            names_which_can_be_offloaded=["flash_attention.out", LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    )
