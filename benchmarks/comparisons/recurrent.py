"""`python benchmarks/comparisons/recurrent.py`: recurrent cells beside torch.nn, and RWKV-4 beside transformers, on a CPU.

Outputs, last states and all gradients, for the same float32 inputs; padded rows beside torch's packed sequences. Needs torch
and transformers, which the project does not install.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels

B, T, D, F = 3, 60, 12, 8
LENGTHS = [60, 41, 7]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def differences(found: list, wanted: list) -> list[float]:
    pairs = zip(found, wanted, strict=True)
    return [float(np.linalg.norm(np.asarray(x) - y) / np.linalg.norm(y)) for x, y in pairs]


def of_cell(cell_type: str, ways: int, activation: str = "tanh") -> tuple[list[float], list[str]]:
    """Returns the relative errors of out, state and gradients, with the names of these."""
    import torch

    rng, n = np.random.default_rng(0), 2 if cell_type == "lstm" else 1
    options = {"nonlinearity": activation} if cell_type == "rnn" else {}
    torch.manual_seed(0)
    layer = getattr(torch.nn, cell_type.upper())(D, F, batch_first=True, bidirectional=ways == 2, **options)
    names = {k: k.replace("_l0", "") for k in layer.state_dict()}
    weights = {names[k]: v.detach().numpy() for k, v in layer.state_dict().items()}
    x, hidden = normal(rng, B, T, D), tuple(normal(rng, ways, B, F) for _ in range(n))

    def mine(x: Any, weights: Any, hidden: Any) -> Any:
        own = tuple(h if ways == 2 else h[0] for h in hidden)
        out, state = kernels.recurrent(
            x, own if n == 2 else own[0], weights, cell_type, ways == 2, activation, lengths=LENGTHS, return_state=True
        )
        return out, tuple(h if ways == 2 else h[None] for h in (state if n == 2 else (state,)))

    found, pull = jax.vjp(jax.jit(mine), jnp.asarray(x), weights, hidden)
    d = jax.tree.map(lambda y: normal(rng, *y.shape), found)
    dx, dw, dh = pull(jax.tree.map(jnp.asarray, d))
    tx = torch.tensor(x, requires_grad=True)
    th = tuple(torch.tensor(h, requires_grad=True) for h in hidden)
    packed = torch.nn.utils.rnn.pack_padded_sequence(tx, LENGTHS, batch_first=True)
    out, state = layer(packed, th if n == 2 else th[0])
    out, _ = torch.nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=T)
    state = state if n == 2 else (state,)
    torch.autograd.backward([out, *state], [torch.tensor(y) for y in jax.tree.leaves(d)])
    own = dict(layer.named_parameters())
    got = [found[0], np.stack(found[1]), dx, *dh, *(dw[names[k]] for k in own)]
    want = [out.detach().numpy(), np.stack([s.detach().numpy() for s in state]), tx.grad.numpy()]
    want += [h.grad.numpy() for h in th] + [p.grad.numpy() for p in own.values()]
    return differences(got, want), ["inputs", *("h", "c")[:n], *names.values()]


def of_rwkv4() -> tuple[list[float], list[str]]:
    import torch
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

    rng = np.random.default_rng(0)
    a = {"w": normal(rng, F), "u": normal(rng, F), "k": 3 * normal(rng, B, T, F), "v": normal(rng, B, T, F)}
    found, pull = jax.vjp(jax.jit(lambda a: kernels.rwkv4(**a, return_state=True)), jax.tree.map(jnp.asarray, a))
    d = tuple(normal(rng, *y.shape) for y in found)
    (gradients,) = pull(tuple(map(jnp.asarray, d)))
    t = {n: torch.tensor(x, requires_grad=True) for n, x in a.items()}
    out, state = rwkv_linear_attention_cpu(t["w"], t["u"], t["k"], t["v"], return_state=True)
    wanted = (out, torch.stack(state, dim=1))
    torch.autograd.backward(wanted, [torch.tensor(x) for x in d])
    want = [y.detach().numpy() for y in wanted] + [t[n].grad.numpy() for n in a]
    return differences([*found, *(gradients[n] for n in a)], want), [*a]


def main() -> None:
    """Prints a row of the table in the README for each cell and each number of directions."""
    import torch
    import transformers

    print(f"torch {torch.__version__}, transformers {transformers.__version__}, float32, {B} rows of {LENGTHS} tokens")
    rows = [
        (f"`torch.nn.{c.upper()}`{', both ways' * (w - 1)}", *of_cell(c, w)) for c in ("lstm", "gru") for w in (1, 2)
    ]
    rows += [(f"`torch.nn.RNN`, {a}", *of_cell("rnn", 2, a)) for a in ("tanh", "relu")]
    rows += [("transformers' `rwkv_linear_attention_cpu`", *of_rwkv4())]
    for name, off, names in rows:
        print(f"| {name} | {off[0]:.1e} | {off[1]:.1e} | {max(off[2:]):.1e} ({names[int(np.argmax(off[2:]))]}) |")


if __name__ == "__main__":
    main()
