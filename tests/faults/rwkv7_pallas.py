"""Faults of the Pallas kernels of RWKV-7."""

from faults import Fault

TESTS = "tests/kernels/test_rwkv7_pallas.py"
FORGETS, DOCUMENTS = f"{TESTS} -k 'every_size and inf'", f"{TESTS} -k documents"
PACKED = f"{TESTS} -k packed_sequences"

FAULTS = (
    Fault(
        "rwkv7 on TPUs: a head of a pack reads what the other writes",
        "pallas_dplr:_alone",
        "jnp.where($of == $j, $x, 0.0)",
        "$x",
        FORGETS,
    ),
    Fault(
        "rwkv7 on TPUs: the heads of a pack have one state",
        "pallas_dplr:_blocks",
        "jnp.where($row == $column, $x, 0.0)",
        "$x",
        FORGETS,
    ),
    Fault(
        "rwkv7 on TPUs: a reads after its token's decay",
        "pallas_dplr:chunk_of",
        "Reader($x.a, True)",
        "Reader($x.a, False)",
        FORGETS,
    ),
    Fault(
        "rwkv7 on TPUs: outputs do not read their own token",
        "pallas_dplr:chunk_of",
        "Reader($x.q, False, True)",
        "Reader($x.q, False)",
        FORGETS,
    ),
    Fault(
        "rwkv7 on TPUs: a reads the state before a chunk with its token's decay",
        "pallas_dplr:chunk_of",
        "$x.a * $d.before",
        "$x.a * $d.enters",
        FORGETS,
    ),
    Fault(
        "rwkv7 on TPUs: keys write the state without the decay after them",
        "pallas_dplr:chunk_of",
        "$x.k * $d.leaves",
        "$x.k",
        FORGETS,
    ),
    Fault(
        "rwkv7 on TPUs: what is read has another sign in the inverse",
        "pallas_dplr:dplr_walk_kernel",
        "-$each.ab[:, $i]",
        "$each.ab[:, $i]",
        FORGETS,
    ),
    Fault(
        "rwkv7 on TPUs: pairs that are read have no gradient",
        "pallas_dplr:finish",
        "jnp.zeros((CHUNK, CHUNK)) if $x.ab is None else -$x.ab[:, $i]",
        "jnp.zeros((CHUNK, CHUNK))",
        FORGETS,
    ),
    Fault(
        "rwkv7 on TPUs: decays of padding have gradients",
        "pallas_dplr:dplr_reverse_kernel",
        "jnp.where($valid, $d.w, 0.0)",
        "$d.w",
        DOCUMENTS,
    ),
    Fault(
        "rwkv7 on TPUs: padding is read",
        "pallas_dplr:load_packs",
        "$x if $valid is None else jnp.where($valid, $x, 0)",
        "$x",
        DOCUMENTS,
    ),
    Fault(
        "rwkv7 on TPUs: a document goes on from the one before it",
        "pallas_dplr_calls:DplrLaunches.marked",
        "with_begins($valid, self.begins)",
        "$valid",
        DOCUMENTS,
    ),
    Fault(
        "rwkv7 on TPUs: a second visit of a block overwrites the first",
        "pallas_dplr:store_packs",
        "jnp.where($more, $ref[0, $h] + $x, $x)",
        "$x",
        PACKED,
    ),
    Fault(
        "rwkv7 on TPUs: final states of a pack are those of its first head",
        "pallas_dplr_calls:DplrLaunches.states",
        "$x[..., $j, :, $j, :]",
        "$x[..., 0, :, 0, :]",
        FORGETS,
    ),
    Fault(
        "rwkv7 on TPUs: packs of a program are one short",
        "pallas_dplr_calls:packs_of",
        "SIDE_BY_SIDE // $pack",
        "SIDE_BY_SIDE // $pack - 1",
        f"{TESTS} -k test_packs",
    ),
)
