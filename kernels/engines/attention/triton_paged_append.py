"""Writes rows into slots of pages where these are: the caches are the kernel's own operands, and no other slot is touched."""

# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.attention.triton_paged_plan import E4M3, E5M2


@triton.jit
def append_kernel(
    key_ptr,  # [M, KEY]
    value_ptr,  # [M, VALUE]
    slots_ptr,  # int32 [M]; a row whose slot there is not is not written
    key_cache_ptr,  # [SLOTS, KEY]
    value_cache_ptr,  # [SLOTS, VALUE]
    SLOTS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    WIDEST: tl.constexpr = KEY if KEY > VALUE else VALUE
    PARTS: tl.constexpr = (WIDEST + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    columns = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    real = (slot >= 0) & (slot < SLOTS)
    if KIND == E4M3 or KIND == E5M2:  # their bits, which every GPU can copy
        key_ptr = key_ptr.to(tl.pointer_type(tl.uint8))
        value_ptr = value_ptr.to(tl.pointer_type(tl.uint8))
        key_cache_ptr = key_cache_ptr.to(tl.pointer_type(tl.uint8))
        value_cache_ptr = value_cache_ptr.to(tl.pointer_type(tl.uint8))
    key = tl.load(key_ptr + row * KEY + columns, mask=real & (columns < KEY))
    value = tl.load(value_ptr + row * VALUE + columns, mask=real & (columns < VALUE))
    tl.store(key_cache_ptr + slot * KEY + columns, key, mask=real & (columns < KEY))
    tl.store(value_cache_ptr + slot * VALUE + columns, value, mask=real & (columns < VALUE))
