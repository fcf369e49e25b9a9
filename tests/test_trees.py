"""tree_mask: against walking up from every node, in attention against the tokens of each branch alone, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import flash_attention, tree_mask

RNG = np.random.default_rng(0)
PARENTS = np.array([[-1, 0, 0, 2, 1, 3, -1, 6, 7], [-1, 0, 1, 2, 3, 4, 5, -2, -2]], np.int32)


def walked(parents, prefix):
    T = len(parents)
    seen = np.zeros((T, prefix + T), bool)
    for node in range(T):
        at = node
        while at >= 0 and parents[node] > -2:
            seen[node, prefix + at] = True
            at = parents[at]
        seen[node, :prefix] = parents[node] > -2
    return seen


@pytest.mark.parametrize("prefix", [0, 5])
def test_a_node_sees_the_text_its_ancestors_and_itself(prefix):
    want = np.stack([walked(row, prefix) for row in PARENTS])
    np.testing.assert_array_equal(tree_mask(PARENTS, prefix), want)
    np.testing.assert_array_equal(jax.jit(lambda p: tree_mask(p, prefix))(PARENTS), want)
    np.testing.assert_array_equal(tree_mask(PARENTS[0], prefix), want[:1])


def test_a_branch_is_as_it_would_be_alone():
    prefix, parents = 5, PARENTS[0]
    keys = jnp.asarray(RNG.standard_normal((1, prefix + 9, 2, 8)), jnp.float32)
    out = flash_attention(keys[:, prefix:], keys, keys, attention_mask=tree_mask(parents, prefix))
    branch = [*range(prefix), *(prefix + n for n in (0, 2, 3, 5))]
    alone = flash_attention(*[keys[:, jnp.asarray(branch)]] * 3, causal=True)
    np.testing.assert_allclose(out[:, jnp.asarray([0, 2, 3, 5])], alone[:, prefix:], atol=1e-5)
    assert (tree_mask(parents, prefix).sum(-1) - 1)[0, jnp.asarray([0, 2, 3, 5])].tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("said", "parents", "prefix"),
    [
        (r"'parents' must be integers \[T\] or \[B, T\], got float32", [0.5], 0),
        (r"'parents' must be integers .* shape \(1, 1, 1\)", [[[-1]]], 0),
        (r"'parents' has a parent at \(1,\) that does not come before", [-1, 1], 0),
        (r"'parents' has a parent at \(0, 1\)", [[-1, -3]], 0),
        (r"'prefix_length' must be an integer of at least 0, got -1", [-1], -1),
    ],
)
def test_what_is_refused(said, parents, prefix):
    with pytest.raises(ValueError, match=f"tree_mask: argument {said}"):
        tree_mask(parents, prefix)
