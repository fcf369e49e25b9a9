"""linear_attention against code that no one here wrote: loops of flash-linear-attention, and MiniMax of transformers, on a CPU.

In two steps, because the two sides rarely live in one environment:

    python benchmarks/comparisons/linear_attention.py ours numbers.npz
    python benchmarks/comparisons/linear_attention.py theirs numbers.npz FOLDER

FOLDER holds the unpacked wheel of `fla-core`; the second step needs torch and transformers, and prints the table.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np

B, T, N, H, LAYER, LAYERS = 2, 100, 4, 16, 3, 8
CALLS = {
    "gla_attention": "query key value g state",
    "rwkv6": "query key value g u state",
    "lightning_attention": "query key value",
}


def inputs():
    """Returns the arrays of every call, and cotangents of out and of the state."""
    rng = np.random.default_rng(0)
    a = {n: rng.standard_normal((B, T, N, H)) for n in ("query", "key", "value", "d_out")}
    a["g"] = -np.exp(rng.standard_normal((B, T, N, H)))
    a |= {n: rng.standard_normal((B, N, H, H)) for n in ("state", "d_state")}
    a["u"] = rng.standard_normal((N, H))
    # As MiniMax has it; see `theirs`.
    a["decay"] = 2.0 ** (-8 * np.arange(1, N + 1) / N) * (1 - LAYER / (LAYERS - 1 + 1e-5) + 1e-5)
    return {n: x.astype(np.float32) for n, x in a.items()}


def ours(file):
    """Writes outputs and gradients of our functions."""
    import jax

    import kernels

    a, found = inputs(), {}
    functions = {
        "gla_attention": lambda query, key, value, g, state: kernels.gla_attention(
            query, key, value, g, state=state, return_state=True
        ),
        "rwkv6": lambda query, key, value, g, u, state: kernels.rwkv6(
            query, key, value, g, u, state=state, return_state=True
        ),
        "lightning_attention": lambda query, key, value: kernels.lightning_attention(
            query, key, value, decay=a["decay"], softmax_scale=1.0, return_state=True
        ),
    }
    for name, function in functions.items():
        given = {n: a[n] for n in CALLS[name].split()}
        outputs, pull = jax.vjp(lambda given, f=function: f(**given), given)
        found |= {f"{name} out": outputs[0], f"{name} state after": outputs[1]}
        found |= {f"{name} d{n}": g for n, g in pull((a["d_out"], a["d_state"]))[0].items()}
    np.savez(file, **found)


def theirs(file, folder):
    """Prints the relative errors of what `ours` wrote."""
    import torch
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    def load(path):
        spec = importlib.util.spec_from_file_location(Path(path).stem, Path(folder) / path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    gla, rwkv = load("fla/ops/gla/naive.py"), load("fla/ops/rwkv6/recurrent_naive.py")
    config = MiniMaxConfig(
        hidden_size=N * H, num_attention_heads=N, head_dim=H, num_hidden_layers=LAYERS, block_size=32
    )
    minimax = MiniMaxLightningAttention(config, LAYER)
    minimax.qkv_proj = minimax.norm = minimax.out_proj = minimax.act_fn = torch.nn.Identity()

    class Open(torch.nn.Module):
        """The gate, let everything through."""

        def forward(self, x):
            return torch.full((B, T, N * H), torch.inf)

    minimax.output_gate = Open()

    def lightning(query, key, value):
        out, state = minimax(torch.cat([query, key, value], -1).reshape(B, T, -1), None, None)
        return out.reshape(B, T, N, H), state

    def by_heads(query, key, value, g, u, state):
        out, after = rwkv.naive_recurrent_rwkv6(
            *(x.transpose(1, 2) for x in (query, key, value, g)), u, None, state, True
        )
        return out.transpose(1, 2), after

    a, got = {n: torch.tensor(x) for n, x in inputs().items()}, np.load(file)
    functions = {
        "gla_attention": lambda query, key, value, g, state: gla.naive_recurrent_gla(query, key, value, g, state, True),
        "rwkv6": by_heads,
        "lightning_attention": lightning,
    }
    print("| function | array | relative error |\n|---|---|---|")
    for name, function in functions.items():
        given = {n: a[n].clone().requires_grad_() for n in CALLS[name].split()}
        out, state = function(**given)
        slopes = torch.autograd.grad((out, state), list(given.values()), (a["d_out"], a["d_state"]))
        want = {"out": out, "state after": state} | {f"d{n}": g for n, g in zip(given, slopes, strict=True)}
        for what, x in want.items():
            x = x.detach().numpy().astype(np.float64)
            print(f"| `{name}` | {what} | {np.linalg.norm(got[f'{name} {what}'] - x) / np.linalg.norm(x):.1e} |")


if __name__ == "__main__":
    {"ours": ours, "theirs": theirs}[sys.argv[1]](*sys.argv[2:])
