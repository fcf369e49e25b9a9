"""Trees of draft tokens, against following the parents one by one; and a verification with a model's own attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
from kernels import flash_attention, tree_attention_mask, tree_depths, verify_tree

RNG = np.random.default_rng(0)


def path(parents, i):
    """Returns i and its ancestors, the root last."""
    return [i] if parents[i] < 0 else [i, *path(parents, parents[i])]


PARENTS = np.stack([[RNG.integers(-1, i) if i else -1 for i in range(13)] for _ in range(3)])
PARENTS[0] = np.arange(13) - 1  # a chain
PARENTS[1] = -1


def test_masks_and_depths_follow_the_parents():
    mask, depths = tree_attention_mask(PARENTS, 4), tree_depths(PARENTS)
    assert mask.shape == (3, 13, 17) and mask[:, :, :4].all()
    for b, i in np.ndindex(3, 13):
        up = path(PARENTS[b], i)
        assert sorted(up) == list(np.flatnonzero(mask[b, i, 4:])) and depths[b, i] == len(up) - 1


def test_attention_to_a_tree_is_attention_along_its_paths():
    T, prefix = 5, 3
    parents = [-1, 0, 0, 1, 2]
    q, k, v = (jnp.asarray(RNG.standard_normal((2, n, 2, 4)).astype(np.float32)) for n in (T, prefix + T, prefix + T))
    real = np.array([[True] * 3, [False, True, True]])
    out = flash_attention(q, k, v, attention_mask=tree_attention_mask(parents, prefix, real))
    for b, i in np.ndindex(2, T):
        keys = [*np.flatnonzero(real[b]), *(prefix + j for j in path(parents, i)[::-1])]
        one = flash_attention(q[b : b + 1, i : i + 1], k[b : b + 1, keys], v[b : b + 1, keys])
        np.testing.assert_allclose(out[b, i], one[0, 0], atol=1e-6)


@pytest.mark.slow
def test_verification_is_greedy_decoding():
    for _ in range(50):
        T, B = int(RNG.choice([1, 2, 5, 11])), 3
        parents = np.array([RNG.integers(-1, i) if i else -1 for i in range(T)])
        drafts, following = RNG.integers(0, 2, (B, T)), RNG.integers(0, 2, (B, T))
        first = RNG.integers(0, 2, B)
        accepted, last = verify_tree(parents, drafts, following, first)
        for b in range(B):
            paths = [path(parents, i)[::-1] for i in range(T)]
            fits = [
                p for p in paths
                if all(drafts[b, j] == (first[b] if parents[j] < 0 else following[b, parents[j]]) for j in p)
            ]  # fmt: skip
            longest = max(fits, key=len, default=[])
            assert list(np.flatnonzero(accepted[b])) == longest and last[b] == (longest[-1] if longest else -1)


@pytest.mark.slow
def test_300_random_trees():
    """Masks, depths and attention, with keys of a prefix that are not valid; of a few lengths, so that programs are reused."""
    for seed in range(300):
        rng = np.random.default_rng(seed)
        T, prefix, B = int(rng.choice([1, 4, 9])), int(rng.choice([0, 3])), 2
        # Of a chain, of siblings, and of what lies between.
        nearest = rng.choice([0, 1, T])
        parents = np.array([[rng.integers(max(-1, i - 1 - nearest), i) for i in range(T)] for _ in range(B)])
        real = rng.random((B, prefix)) < rng.choice([0, 0.5, 1])
        mask, depths = tree_attention_mask(parents, prefix, real), tree_depths(parents)
        q, k, v = (
            jnp.asarray(rng.standard_normal((B, n, 1, 4)).astype(np.float32)) for n in (T, prefix + T, prefix + T)
        )
        out = np.asarray(flash_attention(q, k, v, attention_mask=mask))
        for b, i in np.ndindex(B, T):
            up = path(parents[b], i)
            keys = [*np.flatnonzero(real[b]), *(prefix + j for j in up[::-1])]
            assert list(np.flatnonzero(mask[b, i])) == keys and depths[b, i] == len(up) - 1, seed
            weights = np.exp(np.asarray(k[b, keys, 0] @ q[b, i, 0], np.float64) / 2)
            np.testing.assert_allclose(out[b, i, 0], weights / weights.sum() @ np.asarray(v[b, keys, 0]), atol=2e-6)


@pytest.mark.parametrize(
    ("said", "call"),
    [
        ("'parents' must be integers .* got float32", lambda: tree_attention_mask(jnp.ones(3))),
        ("'prefix_length' must be a number of keys, got -1", lambda: tree_attention_mask([-1], -1)),
        (
            r"'prefix_mask' must be bool \[B, prefix_length = 2\]",
            lambda: tree_attention_mask([-1], 2, jnp.ones((1, 3), bool)),
        ),
        (
            "'prefix_mask' has 3 rows, but 'parents' has 2",
            lambda: tree_attention_mask([[-1], [-1]], 1, jnp.ones((3, 1), bool)),
        ),
        (r"'next_tokens' must be integers \[B, T = 1\]", lambda: verify_tree([-1], [[1]], [[1, 2]], [1])),
        (r"'next_tokens' must be .* B = 1, got int32 of shape \(2, 1\)", lambda: verify_tree([-1], [[1]], [[1], [1]], [1])),
        (r"'first_token' must be integers \[B\] = \(1,\)", lambda: verify_tree([-1], [[1]], [[1]], [1, 2])),
        (r"'first_token' must be integers \[B\] = \(1,\), got float32", lambda: verify_tree([-1], [[1]], [[1]], [1.0])),
        ("'draft_tokens' must be integers .* got None", lambda: verify_tree([-1], None, [[1]], [1])),
        (r"'parents' must be integers .* got \[\[0\], \[1, 2\]\]", lambda: tree_attention_mask([[0], [1, 2]])),
        ("'parents' has 0 for the token at 0; a parent must precede", lambda: verify_tree([0], [[1]], [[1]], [1])),
        ("'parents' has 1 for the token at 1; .* -1 for a root", lambda: tree_attention_mask([[-1, 0], [-1, 1]])),
    ],
)  # fmt: skip
def test_a_wrong_call_names_the_argument(said, call):
    with pytest.raises(ValueError, match=f"argument {said}"):
        call()


def test_a_traced_parent_that_is_not_before_its_token_is_none():
    wrong, none = jnp.array([0, 2, 0]), jnp.array([-1, -1, 0])
    drafts, following, first = jnp.array([[5, 5, 8]]), jnp.array([[8, 9, 1]]), jnp.array([5])
    got = jax.jit(verify_tree)(wrong, drafts, following, first)
    for a, b in zip(got, verify_tree(none, drafts, following, first), strict=True):
        np.testing.assert_array_equal(a, b)


def test_they_are_public():
    assert kernels.tree_attention_mask is tree_attention_mask
