"""A trainer of one's own on the operations of `ejdist`: two layers on this file's own text, sharded parameters and sequence.

python examples/custom_trainer.py    # on the devices there are; four of a CPU: "In your own trainer" in README.md
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ejdist import Order, fused_loss_sums, gated_mlp, make_mesh, ring_attention, rms_norm, rotary_embedding, set_layout
from ejdist.layout import ACTIVATIONS, PARAMETERS, sharding

B, T, L, D, N, K, H, F, V = 4, 128, 2, 64, 4, 2, 16, 128, 256
STEPS = 20
# Of each parameter the shape, and the name of each dim: where it lies follows from the names.
SHAPES = {
    "embedding": ((V, D), "V D"), "head": ((D, V), "D V"), "attention_norm": ((L, D), "L _"), "mlp_norm": ((L, D), "L _"),
    "query": ((L, D, N, H), "L D N H"), "key": ((L, D, K, H), "L D K H"), "value": ((L, D, K, H), "L D K H"),
    "output": ((L, N, H, D), "L N H D"), "gate": ((L, D, F), "L D F"), "up": ((L, D, F), "L D F"),
    "down": ((L, F, D), "L F D"),
}  # fmt: skip
PER_LAYER = [name for name in SHAPES if name not in ("embedding", "head")]


def make_batch(order: Order) -> dict[str, np.ndarray]:
    """Returns rows of two documents each, in the order that the tokens lie on the ranks: one permutation for everything."""
    text = np.frombuffer(Path(__file__).read_bytes()[: B * T], np.uint8).astype(np.int32).reshape(B, T)
    segment_ids = np.broadcast_to(np.arange(T) // (T // 2), (B, T)).astype(np.int32)
    positions = np.broadcast_to(np.arange(T) % (T // 2), (B, T)).astype(np.int32)
    targets = np.where(positions == T // 2 - 1, -1, np.roll(text, -1, axis=1))  # -1: not counted
    batch = {"tokens": text, "targets": targets, "positions": positions, "segment_ids": segment_ids}
    return {name: order.permute(x) for name, x in batch.items()}


def loss(params: dict, batch: dict) -> jax.Array:
    """Returns the mean cross entropy of the next token."""
    ids = batch["segment_ids"]

    def layer(x: jax.Array, p: dict) -> tuple[jax.Array, None]:
        h = rms_norm(x, p["attention_norm"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", h, p[name]) for name in ("query", "key", "value"))
        q, k = rotary_embedding(q, batch["positions"], key=k)
        out = ring_attention(q, k, v, causal=True, q_segment_ids=ids, kv_segment_ids=ids)
        x = x + jnp.einsum("btnh,nhd->btd", out, p["output"])
        return x + gated_mlp(rms_norm(x, p["mlp_norm"]), p["gate"], p["up"], p["down"]), None

    x, _ = jax.lax.scan(layer, params["embedding"][batch["tokens"]], {name: params[name] for name in PER_LAYER})
    sums = fused_loss_sums(rms_norm(x), params["head"], batch["targets"])
    return sums.total / sums.counted


def main() -> None:
    """Trains, and prints the loss."""
    sp = 2 if jax.device_count() > 1 else 1
    mesh = make_mesh(fsdp=2 if jax.device_count() > 3 else 1, sp=sp)
    order = Order("zigzag", sp)
    optimizer = optax.adamw(3e-3)
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    params = {
        name: jax.device_put(
            jnp.ones(shape) if name.endswith("norm") else 0.05 * jax.random.normal(key, shape),
            sharding(mesh, dims.split(), PARAMETERS, shape=shape, what=name),
        )
        for (name, (shape, dims)), key in zip(SHAPES.items(), keys, strict=True)
    }
    state = optimizer.init(params)  # its moments lie as the parameters do
    state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, sharding(mesh, (), PARAMETERS)), state)
    places = jax.tree.map(lambda x: x.sharding, (params, state))
    batch = jax.device_put(make_batch(order), sharding(mesh, ("B", "T"), ACTIVATIONS))

    @functools.partial(jax.jit, out_shardings=(*places, None))  # where they were: else the second step is compiled anew
    def step(params: Any, state: Any, batch: dict) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    print(f"mesh {dict(mesh.shape)}")
    with set_layout(order="zigzag"), jax.set_mesh(mesh):  # which `ring_attention` follows
        for i in range(STEPS):
            params, state, value = step(params, state, batch)
            print(f"step {i:2d} loss {float(value):.4f}")
    print(f"query lies as {params['query'].sharding.spec}")


if __name__ == "__main__":
    main()
