"""Faults of blocksparse_attention."""

from faults import Fault

BLOCKS = "kernels/ops/blocksparse_attention/xla.py"
OF_BLOCKS = "tests/kernels/test_blocksparse_attention.py"
LOCAL = "ejdist/sequence/local.py"

FAULTS = (
    Fault(
        "the last set block is left out",
        BLOCKS,
        "jax.lax.fori_loop(0, jnp.max(count), nth, (largest",
        "jax.lax.fori_loop(0, jnp.max(count) - 1, nth, (largest",
        OF_BLOCKS + " -k may_be_traced",
    ),
    Fault(
        "a lane without blocks goes on beside others",
        BLOCKS,
        "jnp.where(live & _seen(plan, lane, j)",
        "jnp.where(_seen(plan, lane, j)",
        OF_BLOCKS + " -k may_be_traced",
    ),
    Fault(
        "a head's blocks read another key head",
        BLOCKS,
        "of % heads * tables // heads",
        "of % heads % tables",
        OF_BLOCKS + " -k against_a_loop",
    ),
    Fault(
        "block-sparse cap without its slope",
        BLOCKS,
        "(ds if slope is None else ds * slope)",
        "ds",
        OF_BLOCKS + " -k against_a_loop",
    ),
    Fault(
        "a rank takes the blocks of another's keys",
        LOCAL,
        "[..., holders, :]",
        "[..., self.ranks - 1 - holders, :]",
        OF_BLOCKS + " -k on_a_mesh",
    ),
    Fault(
        "a rank takes the blocks of the first's queries",
        "ejdist/sequence/blocksparse.py",
        "exchange.rank(axis) * rows",
        "exchange.rank(axis) * 0",
        OF_BLOCKS + " -k on_a_mesh",
    ),
)
