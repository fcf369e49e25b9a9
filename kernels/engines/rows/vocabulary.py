"""Projections to a vocabulary, a block of tokens at a time: the full logits are never materialised.

XLA runs the matmuls on every device. An operation provides two functions of the logits of a block: its outputs, and
their gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.matmul.dot import dot
from kernels.framework.binding import Call
from kernels.framework.config import Tunables
from kernels.framework.work import Work, nbytes

# Every block reads lm_head and, in a backward, reads and writes its float32 gradient, so below about a thousand rows the
# matmuls are bound by memory for any vocabulary.
_LEAST_ROWS = 1024
# From this many tokens on, copying lm_head to align its rows costs less than reading unaligned rows.
_WORTH_WIDENING = 256
# Bytes to which cuBLAS needs rows of matrices aligned, to read them at full speed.
_ALIGNED = 16


@dataclass(frozen=True)
class VocabularyConfig(Tunables):
    """Tunables; None leaves the choice to the configuration chain.

    Attributes:
      block_rows: rows (tokens) whose logits, of every model, exist at once.
      block_vocab, num_warps: entries of the vocabulary that a program handles at once, and its warps (Triton).
    """

    block_rows: int | None = None
    block_vocab: int | None = None
    num_warps: int | None = None


def no_features(x: jax.Array) -> bool:
    """Returns whether rows of features, of logits, or of a projection to them are empty. Zero tokens are allowed."""
    return any(isinstance(n, int) and n == 0 for n in x.shape[-1:])


# -- tokens in blocks -------------------------------------------------------------------------------------------------


def block_rows(call: Call, elements: int) -> int:
    """Returns the number of tokens per block, for about `elements` logits."""
    return rows_of_block(math.prod(call.dims["lead"]), call.dims["V"], elements)


def most_rows(vocabulary: int, elements: int) -> int:
    """Returns the number of tokens whose logits are about `elements`, in whole tiles."""
    return max(_LEAST_ROWS, elements // vocabulary // 128 * 128)


def rows_of_block(tokens: int, vocabulary: int, elements: int) -> int:
    """Returns the number of tokens per block, from the sizes: 0.75 to 1.5 times `most_rows`, with the fewest rows of padding in
    tiles of 256, in which GPUs multiply them."""
    asked = most_rows(vocabulary, elements)
    most = 3 * asked // 2
    if tokens <= most:
        return max(1, tokens)
    least = -(-tokens // most)
    sizes = [-(-tokens // (128 * blocks)) * 128 for blocks in range(least, 2 * least)]
    return min(sizes, key=lambda size: (-(-tokens // size) * -(-size // 256), abs(size - asked)))


def candidates(call: Call, most: int) -> list[int]:
    """Returns the candidate block sizes for tuning: all tokens, and powers of two up to `most`."""
    tokens = math.prod(call.dims["lead"])
    return [*(r for r in (2**n for n in range(8, most.bit_length())) if r < tokens), max(1, tokens)]


def _in_blocks(x: jax.Array, rows: int, fill: int = 0) -> jax.Array:
    """Returns x [T, ...] as blocks [n, rows, ...], padded."""
    n = -(-x.shape[0] // rows)
    x = jnp.pad(x, [(0, n * rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
    return x.reshape(n, rows, *x.shape[1:])


Models = Sequence[tuple[jax.Array, jax.Array]]  # (hidden [*lead, D], lm_head [D, V]) of each
Row = Mapping[str, jax.Array]  # other arrays per token, by name


def widened(models: Models) -> Models:
    """Returns the models with lm_head [D, V or a few more]: columns of zeros align its rows, and those of logits, for the
    products of GPUs. Unchanged where they are aligned, or tokens so few that the copy would take longer."""
    entries = _ALIGNED // min(lm_head.dtype.itemsize for _, lm_head in models)
    missing = -models[0][1].shape[1] % entries
    if not missing or math.prod(models[0][0].shape[:-1]) < _WORTH_WIDENING:
        return models
    return [(hidden, jnp.pad(lm_head, [(0, 0), (0, missing)])) for hidden, lm_head in models]


def outputs_by_block(
    models: Models, row: Row, rows: int, outputs: Callable[[list, Row], Any], fill: Mapping[str, int] | None = None
) -> Any:
    """Returns `outputs` of all tokens, [*lead] each.

    Args:
      row: [*lead] each.
      rows: tokens of a block.
      outputs: (the logits of each model, [rows, V] in float32, and `row`, [rows] each) -> a pytree of [rows].
      fill: the values of padding in `row`, by default 0.
    """

    def block(_: None, x: Any) -> Any:
        hidden, row = x
        return None, outputs(_logits(models, hidden), row)

    _, blocks = jax.lax.scan(block, None, _blocks(models, row, rows, fill))
    return _out_of_blocks(blocks, models[0][0].shape[:-1])


def gradients_by_block(
    models: Models, row: Row, rows: int, pull: Callable[[list, Row], Any], fill: Mapping[str, int] | None = None
) -> tuple[jax.Array, jax.Array, Any]:
    """Returns the gradients of the first model: of hidden in its dtype, of lm_head in float32; and the extra
    outputs of `pull`.

    Args:
      pull: (arguments of `outputs` in `outputs_by_block`) -> (gradient of the first model's logits, a pytree of [rows]).
    """
    lm_head = models[0][1]

    def block(d_head: jax.Array, x: Any) -> Any:
        hidden, row = x
        d, beside = pull(_logits(models, hidden), row)
        d_hidden = dot("tv,dv->td", d, lm_head).astype(hidden[0].dtype)
        return d_head + dot("td,tv->dv", hidden[0], d), (d_hidden, beside)

    d_head, blocks = jax.lax.scan(block, jnp.zeros(lm_head.shape, jnp.float32), _blocks(models, row, rows, fill))
    d_hidden, beside = _out_of_blocks(blocks, models[0][0].shape[:-1])
    return d_hidden, d_head, beside


def _logits(models: Models, hidden: list[jax.Array]) -> list[jax.Array]:
    return [dot("td,dv->tv", h, lm_head) for h, (_, lm_head) in zip(hidden, models, strict=True)]


def _blocks(models: Models, row: Row, rows: int, fill: Mapping[str, int] | None) -> Any:
    hidden = [_in_blocks(h.reshape(-1, h.shape[-1]), rows) for h, _ in models]
    return hidden, {name: _in_blocks(x.reshape(-1), rows, (fill or {}).get(name, 0)) for name, x in row.items()}


def _out_of_blocks(blocks: Any, lead: tuple[int, ...]) -> Any:
    """Returns blocks [n, rows, ...] as [*lead, ...], without the padding."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: math.prod(lead)].reshape(*lead, *x.shape[2:]), blocks)


# -- logits -----------------------------------------------------------------------------------------------------------


def flat(logits: jax.Array) -> jax.Array:
    """Returns logits [*lead, V] as [rows, V]."""
    return logits.reshape(-1, logits.shape[-1])


def bent(logits: jax.Array, cap: float | None, temperature: float = 1.0) -> tuple[jax.Array, Any]:
    """Returns (the inputs of the softmax in float32, cap tanh(logits / cap) / temperature, and their derivative)."""
    logits = logits.astype(jnp.float32)
    if cap is None:
        return logits / temperature, 1 / temperature
    tanh = jnp.tanh(logits / cap)
    return cap / temperature * tanh, (1 - tanh * tanh) / temperature


def shares(x: jax.Array, lse: jax.Array) -> jax.Array:
    """Returns the softmax of rows, given their lse; 0 in a row that is all -inf, whose lse is -inf."""
    return jnp.exp(x - jnp.where(lse == -jnp.inf, 0.0, lse))


def work_of_pass(logits: Sequence[Any], rows: Sequence[Any], outputs: Sequence[Any]) -> Work:
    """Returns the work of a pass over logits, [rows, V] each, that reads them and `rows` and writes `outputs`."""
    return Work(4 * sum(x.size for x in logits), nbytes(*logits, *rows, *outputs))


# -- XLA --------------------------------------------------------------------------------------------------------------

EVERYWHERE: Any = {
    "platforms": {"cpu", "cuda", "rocm", "tpu"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "symbolic": {"lead"},
}


def facts(config: type, elements: int, most: int) -> Any:
    """Returns the registration of the XLA backend on hidden states: blocks of about `elements` logits, and in tuning at most
    `most` tokens."""
    return {
        **EVERYWHERE,
        "heuristic": lambda call, platform: config(block_rows=block_rows(call, elements)),
        "candidates": lambda call: [config(block_rows=rows) for rows in candidates(call, most)],
    }
