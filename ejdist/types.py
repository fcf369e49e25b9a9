"""Types that users build: masks."""

from kernels.engines.attention.masks import MaskInfo

__all__ = ["MaskInfo"]
