"""The contracts of state spaces and of their convolution: loops over time, and metadata for sharding."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.engines.scan.chunks import ChunkConfig, DiagonalConfig
from kernels.engines.scan.recurrence import loop
from kernels.framework.binding import Call
from kernels.framework.config import Tunables
from kernels.framework.contract import Op
from kernels.framework.measured import bucket, power_of_two
from kernels.framework.work import Work, nbytes
from kernels.ops.state_space import cases

ACTIVATIONS = (None, "silu")


@dataclass(frozen=True)
class ConvConfig(Tunables):
    """Tunables of the convolution's kernels; None leaves the choice to the configuration chain.

    Attributes:
      block_f, num_warps: channels of a program, and its warps.
      tokens: tokens that it loads at once, a power of 2.
      span: tokens of a program in all, a power of 2 not less than `tokens`.
      backward_block_f, backward_tokens, backward_num_warps, backward_span: those of the backward, which has a partial sum of
        the gradient of each weight for each span.
    """

    block_f: int | None = None
    tokens: int | None = None
    num_warps: int | None = None
    span: int | None = None
    backward_block_f: int | None = None
    backward_tokens: int | None = None
    backward_num_warps: int | None = None
    backward_span: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tokens", "span", "backward_tokens", "backward_span"):
            size = getattr(self, name)
            if size is not None and size & (size - 1):
                raise ValueError(f"argument 'cfg': ConvConfig.{name} = {size} is not a power of 2; use one, or None")


def compute_dtype_of(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def state_space_v2(
    x: Float[Array, "B T N Hv"],
    dt: Float[Array, "B T N"],
    A: Float[Array, " N"],
    B: Float[Array, "B T K H"],
    C: Float[Array, "B T K H"],
    D: Float[Array, " N"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B G N H Hv"] | None = None,
    *,
    num_states: int = 1,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B G N H Hv"]]:
    """Returns (out, final state) of Mamba-2's recurrence in each head, all of it in float32:
    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T, out_t = C_t^T h_t + D x_t. Head n uses group n // (N / K) of B and C.

    For states and segments see `kernels.engines.scan.recurrence`. Source: Dao and Gu, 2024, arXiv:2405.21060.
    """
    compute_dtype = compute_dtype_of(x.dtype)
    groups = B.shape[2]
    heads = x.shape[2] // groups

    def step(h, token):
        x, dt, B, C = token
        B, C = (jnp.repeat(y, heads, axis=1) for y in (B, C))
        h = (
            jnp.exp(dt * A.astype(compute_dtype))[..., None, None] * h
            + (dt[..., None] * B)[..., None] * x[..., None, :]
        )
        out = jnp.einsum("bnh,bnhv->bnv", C, h)
        return h, out if D is None else out + D.astype(compute_dtype)[:, None] * x

    start = jnp.zeros((x.shape[0], x.shape[2], B.shape[3], x.shape[3]), compute_dtype)
    xs = tuple(y.astype(compute_dtype) for y in (x, dt, B, C))
    out, final = loop(step, xs, start, segment_ids, initial_state, num_states)
    return out.astype(x.dtype), final


def state_space_v1(
    x: Float[Array, "B T F"],
    dt: Float[Array, "B T F"],
    A: Float[Array, "F H"],
    B: Float[Array, "B T H"],
    C: Float[Array, "B T H"],
    D: Float[Array, " F"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B G F H"] | None = None,
    *,
    num_states: int = 1,
) -> tuple[Float[Array, "B T F"], Float[Array, "B G F H"]]:
    """Returns (out, final state) of Mamba's selective scan in each channel, all of it in float32:
    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t, out_t = C_t^T h_t + D x_t, A diagonal, with H entries per channel.

    For states and segments see `kernels.engines.scan.recurrence`. Source: Gu and Dao, 2023, arXiv:2312.00752.
    """
    compute_dtype = compute_dtype_of(x.dtype)

    def step(h, token):
        x, dt, B, C = token
        h = jnp.exp(dt[..., None] * A.astype(compute_dtype)) * h + (dt * x)[..., None] * B[:, None]
        out = jnp.einsum("bfh,bh->bf", h, C)
        return h, out if D is None else out + D.astype(compute_dtype) * x

    start, xs = jnp.zeros((x.shape[0], *A.shape), compute_dtype), tuple(y.astype(compute_dtype) for y in (x, dt, B, C))
    out, final = loop(step, xs, start, segment_ids, initial_state, num_states)
    return out.astype(x.dtype), final


def causal_conv1d(
    x: Float[Array, "B T F"],
    weight: Float[Array, "F W"],
    bias: Float[Array, " F"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B G F W-1"] | None = None,
    *,
    activation: str | None = None,
    num_states: int = 1,
) -> tuple[Float[Array, "B T F"], Float[Array, "B G F W-1"]]:
    """Returns (out, final state) of a convolution of each channel with its own taps:
    out_t = activation(bias + sum_j weight[:, j] x_{t - W + 1 + j}), in float32.

    The state is the W - 1 inputs before a token, oldest first: zeros at the start of a segment. A window holds the last
    W valid tokens of its segment. For states and segments see `kernels.engines.scan.recurrence`.

    Raises:
      ValueError: the activation is unknown.
    """
    check_activation(activation)
    compute_dtype = compute_dtype_of(x.dtype)

    def step(before, x):
        window = jnp.concatenate([before, x[..., None]], axis=-1)
        out = jnp.sum(window * weight.astype(compute_dtype), axis=-1)
        out = out if bias is None else out + bias.astype(compute_dtype)
        return window[..., 1:], jax.nn.silu(out) if activation else out

    start = jnp.zeros((x.shape[0], x.shape[2], weight.shape[1] - 1), compute_dtype)
    out, final = loop(step, x.astype(compute_dtype), start, segment_ids, initial_state, num_states)
    return out.astype(x.dtype), final


def check_activation(activation: str | None) -> None:
    """Raises ValueError for an unknown activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"causal_conv1d: argument 'activation' = {activation!r} is unknown; use 'silu' or None")


# -- how much there is to do -------------------------------------------------------------------------------------------


def _state_bytes(call: Call, *dims: int) -> int:
    """Returns the bytes of the initial and final states, float32."""
    size = call.dims["B"] * call.num_states * 4
    for n in dims:
        size *= n
    return size * (1 if call.initial_state is None else 2)


def _of_state_space(call: Call, elements: int, state: int) -> tuple[Work, Work]:
    """Returns the work of a state space: per token, 6 flops per element of the state; the backward recomputes that and
    has two such adjoints. The arrays are read once, and in the backward their gradients are written."""
    arrays = nbytes(call.x, call.dt, call.A, call.B, call.C, call.D)
    out = nbytes(call.x)
    ids = nbytes(call.segment_ids)
    return (
        Work(6 * elements, arrays + out + ids + state),
        Work(18 * elements, 2 * arrays + out + ids + 2 * state),
    )


def work_v2(call: Call) -> tuple[Work, Work]:
    d = call.dims
    elements = d["B"] * d["T"] * d["N"] * d["H"] * d["Hv"]
    return _of_state_space(call, elements, _state_bytes(call, d["N"], d["H"], d["Hv"]))


def work_v1(call: Call) -> tuple[Work, Work]:
    d = call.dims
    return _of_state_space(call, d["B"] * d["T"] * d["F"] * d["H"], _state_bytes(call, d["F"], d["H"]))


def work_conv(call: Call) -> tuple[Work, Work]:
    """Returns the work of the convolution: a multiply-add per tap. The backward has two convolutions of that size, and
    with an activation recomputes the first one."""
    taps = 2 * call.x.size * call.dims["W"]
    weights, state = nbytes(call.weight, call.bias), _state_bytes(call, call.dims["F"], call.dims["W"] - 1)
    forward = Work(taps, 2 * nbytes(call.x) + weights + state + nbytes(call.segment_ids))
    again = 3 if call.activation else 2
    return forward, Work(again * taps, 3 * nbytes(call.x) + 2 * weights + 2 * state + nbytes(call.segment_ids))


def autotune_key_v2(call: Call) -> str:
    """Returns the measurement key of a call: the width of a state, and the number of tokens."""
    width = power_of_two(max(call.dims["H"], call.dims["Hv"]))
    return f"{call.dtype} width<={width} tokens{bucket(call.dims['T'], 2, 64, 4096, 32768)}"


def autotune_key_v1(call: Call) -> str:
    """Returns the measurement key of a call: numbers of a channel, channels of all rows, and tokens."""
    d = call.dims
    sizes = f"channels{bucket(d['B'] * d['F'], 1024, 8192, 65536)} tokens{bucket(d['T'], 2, 64, 4096, 32768)}"
    return f"{call.dtype} numbers<={power_of_two(d['H'])} {sizes}"


def autotune_key_conv(call: Call) -> str:
    """Returns the measurement key of a call: its window, whether rows hold documents, channels and tokens."""
    d = call.dims
    rows = "rows" if call.segment_ids is None and call.num_states == 1 else "documents"
    sizes = f"window{bucket(d['W'], 5)} channels{bucket(d['F'], 1024, 6144)} tokens{bucket(d['T'], 1024, 16384)}"
    return f"{call.dtype} {rows} {sizes}"


v2_op = Op(
    state_space_v2,
    outputs=("out", "final_state"),
    local_dims={"B", "N", "K"},
    tied_dims=(("N", "K"),),
    see_also={"T": "state_space_v2"},
    ordered=True,
    autotune_key=autotune_key_v2,
    weights=("A", "D"),
    config=ChunkConfig,
    cases=cases.V2,
    work=work_v2,
)
v1_op = Op(
    state_space_v1,
    outputs=("out", "final_state"),
    local_dims={"B", "F"},
    see_also={"T": "state_space_v1"},
    ordered=True,
    weights=("A", "D"),
    autotune_key=autotune_key_v1,
    config=DiagonalConfig,
    cases=cases.V1,
    work=work_v1,
)
conv_op = Op(
    causal_conv1d,
    outputs=("out", "final_state"),
    local_dims={"B", "F"},
    see_also={"T": "causal_conv1d"},
    ordered=True,
    weights=("weight", "bias"),
    autotune_key=autotune_key_conv,
    config=ConvConfig,
    cases=cases.CONV,
    work=work_conv,
)
