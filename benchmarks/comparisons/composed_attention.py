"""`python -m benchmarks.comparisons.composed_attention [rounds=5] [out=FILE] [commit=]`: what is composed of attention,
beside its parts.

On one GPU, kernel times by the profiler, parts and whole in turns: block-sparse attention (a tenth of the blocks) as a share of
dense attention; differential attention beside two calls of flash attention; latent attention beside attention of the same heads
plus the two up-projections; the products of the mixture of heads. The tests and `python -m benchmarks OPERATION` check the
numbers of each.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import kernels
from benchmarks.cases import split
from benchmarks.measure import provenance, short
from benchmarks.options import read
from benchmarks.programs import JaxPrograms
from benchmarks.race import DIRECTIONS
from benchmarks.timing import kernel_seconds
from kernels.ops.multi_latent_attention.heads import joined_heads

OPTIONS = {"rounds": 5, "out": "", "commit": ""}
CALLS = 5

Runs = dict[str, dict[str, Callable[[int], Any]]]


def _case(operation: str, name: str) -> tuple[Any, dict, dict, dict]:
    """Returns (the operation, its float arrays, other data, Python values) of a case."""
    op = kernels.operations()[operation]
    case = next(c for c in op.cases if c.name == name)
    return op, *split(op.case_inputs(case, dtype="bfloat16"))


def _programs(function: Callable, floats: dict, data: dict) -> dict[str, Callable[[int], Any]]:
    programs = JaxPrograms(function)
    inputs = programs.load(floats, data)
    saved = programs.save(inputs)
    outputs, _ = saved
    sent = tuple(jax.random.normal(jax.random.key(1), x.shape).astype(x.dtype) for x in outputs)
    return {
        "forward": lambda n: programs.forward(inputs),
        "backward": lambda n: programs.backward(saved, sent),
        "both": lambda n: programs.both(inputs, sent),
    }


def _race(runs: Runs, rounds: int) -> dict[str, dict[str, float]]:
    """Returns direction -> contestant -> median microseconds."""
    result = {}
    for direction in DIRECTIONS:
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for name in runs:
            jax.block_until_ready(runs[name][direction](0))
        for n in range(rounds):
            for name in list(runs)[:: 1 if n % 2 else -1]:
                seconds = kernel_seconds(runs[name][direction], jax.block_until_ready, CALLS)
                samples[name].append(seconds * 1e6)
        result[direction] = {name: short(statistics.median(times)) for name, times in samples.items()}
    return result


def sparse(rounds: int) -> dict:
    """Block-sparse attention beside dense attention of the same arrays."""
    _, floats, _, _ = _case("blocksparse_attention", "tenth_of_32k")
    dense = {name: floats[name] for name in ("query", "key", "value")}
    flash = kernels.operations()["flash_attention"]
    runs = {"dense": _programs(lambda **arrays: flash(**arrays)[0], dense, {})}
    for name in ("tenth_of_32k", "tenth_of_32k_per_head", "tenth_of_32k_narrow"):
        op, floats, data, static = _case("blocksparse_attention", name)
        runs[name] = _programs(lambda _op=op, _static=static, **arrays: _op(**_static, **arrays)[0], floats, data)
    return _race(runs, rounds)


def differential(rounds: int) -> dict:
    op, floats, data, static = _case("differential_attention", "causal_8k")
    flash = kernels.operations()["flash_attention"]

    def two(query, key, query_2, key_2, value, lambda_, mask=None):
        return tuple(flash(query=q, key=k, value=value, mask=mask)[0] for q, k in ((query, key), (query_2, key_2)))

    return _race(
        {
            "differential_attention": _programs(lambda **arrays: op(**static, **arrays)[0], floats, data),
            "two calls of flash_attention": _programs(lambda **arrays: two(**static, **arrays), floats, data),
        },
        rounds,
    )


def latent(rounds: int) -> dict:
    op, floats, data, static = _case("flash_mla", "deepseek_v3_8k")
    flash = kernels.operations()["flash_attention"]
    parts = ("query", "key_value", "w_kc", "w_vc", "query_rope", "key_rope")
    heads = jax.jit(joined_heads)(*(floats[name] for name in parts))
    scale = static.get("softmax_scale") or 1 / math.sqrt(heads[0].shape[-1])
    masks = ({name: part["mask"] for name in ("mask",) if name in part} for part in (static, data))
    of_program, of_call = masks
    attention = _programs(
        lambda **arrays: flash(**of_program, **arrays, softmax_scale=scale)[0],
        dict(zip(("query", "key", "value"), heads, strict=True)),
        of_call,
    )

    def up(key_value, w_kc, w_vc):
        return jnp.einsum("bsr,rkh->bskh", key_value, w_kc), jnp.einsum("bsr,rkv->bskv", key_value, w_vc)

    result = _race(
        {
            "flash_mla": _programs(lambda **arrays: op(**static, **arrays)[0], floats, data),
            "flash_attention": attention,
            "up-projections": _programs(up, {name: floats[name] for name in ("key_value", "w_kc", "w_vc")}, {}),
        },
        rounds,
    )
    for times in result.values():
        times["attention and up-projections"] = short(times["flash_attention"] + times["up-projections"])
    return result


def mixture(rounds: int) -> dict:
    """The mixture of heads, and its two products alone: 16 slots of each token, 32 experts of equal weight in the mean."""
    op, floats, data, static = _case("mixture_of_attention_heads", "moa_4k")
    (B, T, D), E, k = floats["x"].shape, floats["w_query"].shape[0], static["top_k"]
    expert = jax.random.randint(jax.random.key(2), (B * T * k,), 0, E)
    sizes = jnp.bincount(expert, length=E).astype(jnp.int32)

    def product(lhs, rhs, sizes):
        return kernels.grouped_matmul(lhs, rhs, sizes)

    runs = {"mixture_of_attention_heads": _programs(lambda **arrays: op(**static, **arrays), floats, data)}
    for name in ("w_query", "w_out"):
        rhs = floats[name]
        lhs = jax.random.normal(jax.random.key(3), (B * T * k, rhs.shape[1])).astype(rhs.dtype)
        runs[f"product with {name}"] = _programs(product, {"lhs": lhs, "rhs": rhs}, {"sizes": sizes})
    result = _race(runs, rounds)
    flops = 2 * B * T * k * D * floats["w_query"].shape[2]
    for times, products in zip(result.values(), (1, 2, 3), strict=True):
        for name in ("w_query", "w_out"):
            times[f"TFLOP/s with {name}"] = short(products * flops / times[f"product with {name}"] / 1e6)
    return result


def main(argv: list[str]) -> None:
    options = read(OPTIONS, argv)
    result: dict[str, Any] = {"device": jax.devices()[0].device_kind, **provenance(options["commit"] or None)}
    for measure in (sparse, differential, latent, mixture):
        result[measure.__name__] = measure(options["rounds"])
        for direction, times in result[measure.__name__].items():
            print(f"{measure.__name__} {direction}: " + ", ".join(f"{name} {x:g}" for name, x in times.items()))
        if options["out"]:
            Path(options["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
