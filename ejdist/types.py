"""Types that users build: masks."""

from kernels._core.masks import MaskInfo

__all__ = ["MaskInfo"]
