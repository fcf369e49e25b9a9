"""Small layers of every recurrence, their parameters, and rows of documents."""

import jax.numpy as jnp
import numpy as np
from recurrent_layers_loop import LAYERS

from ejdist.models import decoder, parts
from ejdist.models.recurrent_shapes import GatedDeltaShape, GlaShape, KdaShape, LightningShape, Mamba2Shape, Rwkv7Shape
from ejdist.operations import bind_ops

KINDS = [*LAYERS]
SIZES = {
    "gated_delta": GatedDeltaShape(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, conv_width=3),
    "kda": KdaShape(num_heads=4, key_dim=3, value_dim=5, conv_width=3, rank=8, gate_bias=True),
    "mamba2": Mamba2Shape(num_heads=4, head_dim=3, state_dim=5, num_groups=2, conv_width=3),
    "lightning": LightningShape(num_heads=4, head_dim=3),
    "gla": GlaShape(num_heads=4, key_dim=3, value_dim=5, rank=8, normalizer=3.0),
    "rwkv7": Rwkv7Shape(num_heads=4, head_dim=3, decay_rank=8, rate_rank=8, gate_rank=16),
}
# Documents that begin next to each other, with padding between two of one id and at the end of a row.
IDS = np.array([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, -1, 3, 3, 3, 3], [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 6, 6, 6, -1, -1]])


def config(kind, **changes):
    return decoder.DecoderConfig(
        model_dim=8, num_layers=3, layer_pattern=(f"{kind}+mlp",), norm_eps=1e-5, **{kind: SIZES[kind]}, **changes
    )


def drawn(part, c, seed=0):
    """Returns parameters of a layer, none of which has the value that it starts with."""
    rng = np.random.default_rng(seed)
    spread = {
        "zeros": (0, 0.5),
        "ones": (1, 0.3),
        "normal": (0, 0.6),
        "log": (0.3, 0.5),
        "inverse_softplus": (-1, 0.7),
        "ramp": (0.5, 0.4),
    }
    return {n: (spread[p.init][0] + spread[p.init][1] * rng.standard_normal(p.shape)).astype(np.float32)
            for n, p in part.declare(c).items()}  # fmt: skip


def layer(kind, c, number):
    """Returns the function (params, x) -> the result of a layer of that kind."""
    batch = {"segment_ids": jnp.asarray(IDS)}
    at = parts.LayerContext(c, bind_ops(None), batch, 0, jnp.int32(number), 0, 0, {})
    return lambda params, x: parts.PARTS[kind].apply(x, params, at)[0]
