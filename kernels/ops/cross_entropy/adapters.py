"""Cross entropy on every toolchain: adapts functions of logits to the parameters of the contracts.

A backend provides two functions of logits [rows, V]; the arrays in `row` are [rows]:
  outputs: (logits, targets, soft cap, cfg) -> (lse, target_logit, mean_logit), [rows] each.
  pull: (logits, row, dtype, soft cap, cfg) -> their gradient, in that dtype; `row` has `PER_TOKEN`.

Of a backend that says `widens`, logits may be [rows, V and a few more], and both functions take V, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.rows.losses import ALSO_IGNORED
from kernels.engines.rows.vocabulary import bent, flat, gradients_by_block, outputs_by_block, shares, widened
from kernels.ops.cross_entropy.contract import Terms, logits_op, op, summed, sums_op, terms_of_tokens

# Logits of one block: 2^26 float32 are 256 MiB.
BLOCK_ELEMENTS, MOST_ROWS = 2**26, 8192
PER_TOKEN = ("targets", "lse", "d_lse", "d_target_logit", "d_mean_logit")


def gradient(logits: jax.Array, columns: jax.Array, row: Mapping[str, Any], V: int, cap: float | None) -> jax.Array:
    """Returns the gradient of a tile of logits, float32. `columns` are their vocabulary entries; `row` has `PER_TOKEN` as
    [rows, 1]."""
    x, slope = bent(logits, cap)
    d = shares(x, row["lse"]) * row["d_lse"] + row["d_mean_logit"] / V
    # One entry per row. A comparison fuses into the expression; a scatter would be a separate pass.
    return (d + jnp.where(columns == row["targets"], row["d_target_logit"], 0.0)) * slope


def register_logits(name: str, outputs_of: Callable, pull: Callable, **facts: Any) -> None:
    """Registers a backend of the operation on existing logits."""

    def forward(logits, targets, logits_soft_cap, cfg):
        outputs = outputs_of(flat(logits), targets.reshape(-1), logits_soft_cap, cfg)
        return tuple(x.reshape(targets.shape) for x in outputs)

    def backward(saved, logits, targets, logits_soft_cap, cfg):
        row = {name: x.reshape(-1) for name, x in _per_token(saved, targets).items()}
        return {"logits": pull(flat(logits), row, logits.dtype, logits_soft_cap, cfg).reshape(logits.shape)}

    logits_op.register(forward, backward, name=name, **facts)


def _per_token(saved: Mapping[str, jax.Array], targets: jax.Array) -> dict[str, jax.Array]:
    return {name: targets if name == "targets" else saved[name] for name in PER_TOKEN}


def register(name: str, outputs_of: Callable, pull: Callable, *, widens: bool = False, **facts: Any) -> None:
    """Registers a backend of both operations on hidden states: terms per token, and their sums.

    Args:
      widens: whether its functions take logits with columns past the vocabulary, see `widened`.
    """

    def model(hidden: jax.Array, lm_head: jax.Array) -> tuple[Any, dict[str, int]]:
        """Returns the model whose logits its functions read, and what else they are called with."""
        return (widened([(hidden, lm_head)]), {"V": lm_head.shape[1]}) if widens else ([(hidden, lm_head)], {})

    def forward(hidden, lm_head, targets, logits_soft_cap, cfg):
        models, also = model(hidden, lm_head)

        def outputs(logits: list, row: Any) -> Any:
            return outputs_of(logits[0], row["targets"], logits_soft_cap, cfg, **also)

        row, padding = {"targets": targets}, {"targets": -1}
        return outputs_by_block(models, row, cfg.block_rows, outputs, padding)

    def backward(saved, hidden, lm_head, targets, logits_soft_cap, cfg):
        models, also = model(hidden, lm_head)

        def pulled(logits: list, row: Any) -> Any:
            return pull(logits[0], row, hidden.dtype, logits_soft_cap, cfg, **also), ()

        # A padded row has cotangents of zero, and lse = 0 keeps its exponential finite.
        row, padding = _per_token(saved, targets), {"targets": -1}
        d_hidden, d_head, _ = gradients_by_block(models, row, cfg.block_rows, pulled, padding)
        return {"hidden": d_hidden, "lm_head": d_head[:, : lm_head.shape[1]]}

    def forward_sums(hidden, lm_head, targets, weights, ignore_index, label_smoothing, z_loss, logits_soft_cap, cfg):
        how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
        outputs = forward(hidden, lm_head, targets, logits_soft_cap, cfg)
        return summed(terms_of_tokens(*outputs, targets=targets, vocabulary=lm_head.shape[1], **how), weights)

    def walked(hidden, lm_head, targets, weights, how, logits_soft_cap, cfg, of_token: Callable) -> Any:
        """Returns (terms of each token, gradients of the sum of `of_token(terms)` times weights: of hidden and of lm_head)."""
        each = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
        models, also = model(hidden, lm_head)

        def pulled(logits: list, row: Any) -> Any:
            outputs = outputs_of(logits[0], row["targets"], logits_soft_cap, cfg, **also)

            def losses(*outputs: jax.Array) -> Any:
                terms = terms_of_tokens(*outputs, targets=row["targets"], vocabulary=lm_head.shape[1], **how)
                return of_token(terms), terms

            _, pull_losses, terms = jax.vjp(losses, *outputs, has_aux=True)
            per_token = dict(zip(PER_TOKEN, (row["targets"], outputs[0], *pull_losses(row["weights"])), strict=True))
            return pull(logits[0], per_token, hidden.dtype, logits_soft_cap, cfg, **also), terms

        # Padded rows are ignored for any `ignore_index`.
        row, padding = {"targets": targets, "weights": each}, {"targets": ALSO_IGNORED}
        d_hidden, d_head, terms = gradients_by_block(models, row, cfg.block_rows, pulled, padding)
        return terms, d_hidden, d_head[:, : lm_head.shape[1]]

    def keeping_sums(hidden, lm_head, targets, weights, ignore_index, label_smoothing, z_loss, logits_soft_cap, cfg):
        how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
        terms, d_hidden, d_head = walked(hidden, lm_head, targets, weights, how, logits_soft_cap, cfg, _together)
        residuals = {"hidden_gradient": d_hidden, "lm_head_gradient": d_head, "losses": _together(terms)}
        return summed(terms, weights), residuals

    def backward_sums(
        saved, hidden, lm_head, targets, weights, ignore_index, label_smoothing, z_loss, logits_soft_cap, cfg
    ):
        d_total, d_loss, d_z_loss = (saved.get(f"d_{output}") for output in sums_op.outputs)
        if z_loss == 0:  # then the loss is the total, and z_loss a constant
            d_total, d_loss, d_z_loss = _added(d_total, d_loss), None, None
        if d_loss is None and d_z_loss is None:
            gradients = {"hidden": saved.hidden_gradient, "lm_head": saved.lm_head_gradient, "weights": saved.losses}
            gradients = {name: d_total * x.astype(jnp.float32) for name, x in gradients.items()}
        else:  # the residuals are the gradients of the sum of both terms
            of_loss, of_z = _added(d_total, d_loss), _added(d_total, d_z_loss)

            def of_token(terms: Terms) -> jax.Array:
                return of_loss * terms.cross_entropy + of_z * terms.z_loss

            how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
            terms, d_hidden, d_head = walked(hidden, lm_head, targets, weights, how, logits_soft_cap, cfg, of_token)
            gradients = {"hidden": d_hidden, "lm_head": d_head, "weights": of_token(terms)}
        return {name: x for name, x in gradients.items() if name != "weights" or weights is not None}

    op.register(forward, backward, name=name, **facts)
    sums_op.register(forward_sums, backward_sums, forward_with_residuals=keeping_sums, name=name, **facts)


def _together(terms: Terms) -> jax.Array:
    return terms.cross_entropy + terms.z_loss


def _added(*cotangents: jax.Array | None) -> Any:
    """Returns the sum of the cotangents that are not None, or 0."""
    return sum((x for x in cotangents if x is not None), start=jnp.float32(0))
