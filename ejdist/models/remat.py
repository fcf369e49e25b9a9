"""Remat policies: what a layer saves for its backward. A policy is a line in `REMAT`, which layers and the planner use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ejdist.precision import OPERAND, PRODUCT


@dataclass(frozen=True)
class PartBytes:
    """Bytes of one part of a layer on a device, for one microbatch.

    The first four are the residuals of its backward, besides the layer's input; a remat policy says which to save from the
    forward, and the others are recomputed.

    Attributes:
      saved: the values in `Part.saves`. offloaded: the values in `Part.offloads`.
      products: other results of projections.
      rest: everything else.
      work: live at the peak of the part's backward, saved or not: inputs, results and their gradients.
      moved: beside `work`, what passes over the memory as often, for a step's time.
      tpu_rest: also there with `rest`, of what kernels of TPUs keep of their forward for their backward; and live at that peak.
      gpu_rest: as `tpu_rest`, of kernels for GPUs; at the peak it is there either way, kept or made again.
      gpu_work: also live there in programs that XLA compiles for GPUs. tpu_work: the same for TPUs.
      gpu_beside: also live there where the layer has another part, whose backward comes before; with it what that part's
        gradients of matrices are made of, its `gpu_waits`: XLA for GPUs leaves those products until the layer is done.
      gpu_zeros: initial zeros of a loop inside the part, which XLA for GPUs hoists out of the loop over layers, so that they
        are live in the backward of every part.
    """

    saved: int
    offloaded: int
    products: int
    rest: int
    work: int
    moved: int = 0
    tpu_rest: int = 0
    gpu_rest: int = 0
    gpu_work: int = 0
    gpu_zeros: int = 0
    tpu_work: int = 0
    gpu_beside: int = 0
    gpu_waits: int = 0


@dataclass(frozen=True)
class Remat:
    """What a policy saves from the forward of a layer, besides the layer's input. The backward recomputes the rest.

    Attributes:
      asked: the values that parts name in `saves` and `offloads`, such as attention's output and lse.
      products: the results of projections and, of those in 8 bits, what gradients of matrices are products of.
      rest: everything else; only together with the other two.
      host: keep large values that are saved, those in `offloads` and the layer's input, in the memory of the host.
    """

    asked: bool
    products: bool
    rest: bool = False
    host: bool = False

    def __post_init__(self) -> None:
        if self.rest and not (self.asked and self.products):
            raise ValueError(f"{self} saves 'rest': it must also save 'asked' and 'products'")
        if self.host and self.products:
            raise ValueError(f"{self} with host=True saves only named values: give products=False")

    def policy(self, saves: Sequence[str], offloads: Sequence[str], layer_input: str) -> Callable[..., Any] | None:
        """Returns the policy for `jax.checkpoint`, None if everything is saved. The arguments are checkpoint names."""
        if self.rest:
            return None
        policies = jax.checkpoint_policies
        if self.host:
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[*saves] if self.asked else [],
                names_which_can_be_offloaded=[*offloads, layer_input] if self.asked else [layer_input],
                offload_src="device",
                offload_dst="pinned_host",
            )
        asked = policies.save_only_these_names(*offloads, *saves) if self.asked else policies.nothing_saveable
        if not self.products:
            return asked
        products = policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(PRODUCT, OPERAND)
        )
        return policies.save_from_both_policies(products, asked)

    def kept_on_host(self, part: PartBytes) -> int:
        """Returns the bytes of a part that are in the memory of the host from its forward to its backward."""
        return self.asked * self.host * part.offloaded

    def kept(self, part: PartBytes) -> int:
        """Returns the bytes of a part that stay on the device from its forward to its backward."""
        asked = part.saved + (0 if self.host else part.offloaded)
        return self.asked * asked + self.products * part.products + self.rest * part.rest

    def made_again(self, part: PartBytes) -> int:
        """Returns the bytes of a part's residuals that its backward finds computed again."""
        asked = (not self.asked) * (part.saved + part.offloaded)
        return asked + (not self.products) * part.products + (not self.rest) * part.rest


# From most memory to least.
REMAT: dict[str, Remat] = {
    "none": Remat(asked=True, products=True, rest=True),
    "dots": Remat(asked=True, products=True),
    "attention": Remat(asked=True, products=False),  # no attention runs twice
    "offload": Remat(asked=True, products=False, host=True),
    "full": Remat(asked=False, products=False),
    "offload_inputs": Remat(asked=False, products=False, host=True),
}
