"""An error of a kernel, which is raised when a program is lowered, shows who called the operation when it was traced."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from toy import make_op

from ejdist import make_mesh, ring_attention
from kernels.framework.contract import Unsupported
from kernels.ops.flash_attention import op as flash


def failing(op, monkeypatch):
    def forward(query, key, value, mask=None, *, cfg=None):
        raise RuntimeError("a kernel failed")

    monkeypatch.setitem(op._backends, "xla", dataclasses.replace(op.backends["xla"], forward=forward))
    monkeypatch.setattr(op, "_programs", {})


def stack_of(caught):
    (note,) = [note for note in getattr(caught.value, "__notes__", []) if "was first called" in note]
    return note


def test_a_kernel_that_fails_in_a_ring_shows_the_caller_the_scheme_and_the_hop(monkeypatch):
    failing(flash, monkeypatch)
    x = jnp.ones((1, 24, 3, 8))  # of no other test: JAX keeps what it has traced

    def a_model_of_mine(x):
        return ring_attention(x, x, x, mesh=make_mesh(sp=4, devices=jax.devices()[:4]))

    with pytest.raises(RuntimeError, match="a kernel failed") as caught:
        jax.jit(a_model_of_mine)(x)
    stack = stack_of(caught)
    assert stack.startswith("flash_attention was first called")
    frames = ("in a_model_of_mine", "in on_shard", "ejdist/sequence/schemes.py", "in attend_at")
    places = [stack.index(frame) for frame in frames]
    assert places == sorted(places), stack
    assert f"{jax.__path__[0]}/" not in stack, "JAX's own frames must be omitted"


def test_a_platform_without_a_backend_shows_the_caller():
    op = make_op()
    op.register(lambda x, cfg: (x, x[..., 0]), name="xla", platforms={"cpu"}, dtypes={"float32"})

    def a_model_of_mine(x):
        return op(x)[0]

    exported = jax.jit(a_model_of_mine).trace(jnp.ones((2, 5)))
    with pytest.raises(Unsupported, match="toy cannot be compiled for tpu") as caught:
        exported.lower(lowering_platforms=("tpu",))
    assert "in a_model_of_mine" in stack_of(caught)
