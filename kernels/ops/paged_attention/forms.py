"""Attention over pages in the one form that the engines in Triton and Pallas take: rows of queries, and `Requests`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from kernels.engines.attention.paged_requests import Requests


def int32(x: Any) -> Any:
    """Returns an array of integers as int32; None stays None."""
    return None if x is None else x.astype(jnp.int32)


def _options(softmax_scale: Any, logits_soft_cap: Any, causal: Any, window: Any) -> dict[str, Any]:
    return {"softmax_scale": softmax_scale, "logits_soft_cap": logits_soft_cap, "causal": causal, "window": window}


def forms_of(attend: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Returns the backends of `paged_attention`, `page_attention` and `decode_attention` that an engine serves.

    Args:
      attend: (name of the operation, queries [M, N, H], (key cache, value cache), (scales of keys, of values), softmax_aux,
        alibi_slopes, requests, cfg, options) -> [M, N, Hv]. Options are softmax_scale, logits_soft_cap, causal, window.
    """

    def of_rows(name, query, caches, scales, softmax_aux, alibi_slopes, requests, cfg, options):
        """Returns attention of B requests with T queries each."""
        B, T, N, H = query.shape
        rows, requests = query.reshape(B * T, N, H), requests._replace(each=T)
        out = attend(name, rows, caches, scales, softmax_aux, alibi_slopes, requests, cfg, options)
        return out.reshape(B, T, N, -1)

    def paged_attention(
        query, key_cache, query_start_loc, kv_lens, block_tables, value_cache, k_scale, v_scale, softmax_aux,
        alibi_slopes, softmax_scale, logits_soft_cap, causal, window, cfg,
    ):  # fmt: skip
        requests = Requests(int32(kv_lens), int32(block_tables), int32(query_start_loc))
        caches, scales = (key_cache, value_cache), (k_scale, v_scale)
        options = _options(softmax_scale, logits_soft_cap, causal, window)
        return attend("paged_attention", query, caches, scales, softmax_aux, alibi_slopes, requests, cfg, options)

    def page_attention(
        query, key_cache, kv_lens, block_tables, value_cache, k_scale, v_scale, softmax_aux, alibi_slopes,
        softmax_scale, logits_soft_cap, causal, window, cfg,
    ):  # fmt: skip
        requests = Requests(int32(kv_lens), int32(block_tables))
        caches, scales = (key_cache, value_cache), (k_scale, v_scale)
        options = _options(softmax_scale, logits_soft_cap, causal, window)
        return of_rows("page_attention", query, caches, scales, softmax_aux, alibi_slopes, requests, cfg, options)

    def decode_attention(
        query, key_cache, value_cache, kv_lens, kv_starts, k_scale, v_scale, softmax_aux, alibi_slopes, softmax_scale,
        logits_soft_cap, causal, window, cfg,
    ):  # fmt: skip
        # Each row of a dense cache is one page, as long as the cache.
        requests = Requests(int32(kv_lens), None, starts=int32(kv_starts))
        caches, scales = (key_cache, value_cache), (k_scale, v_scale)
        options = _options(softmax_scale, logits_soft_cap, causal, window)
        return of_rows("decode_attention", query, caches, scales, softmax_aux, alibi_slopes, requests, cfg, options)

    forms = (paged_attention, page_attention, decode_attention)
    for form in forms:
        form.__module__ = attend.__module__  # a backend has the name of its module
    return forms
