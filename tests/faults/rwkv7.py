"""Faults of the Triton kernels of RWKV-7."""

from faults import Fault

TESTS = "tests/kernels/test_rwkv7_triton.py"
CHUNKS = "triton_dplr:dplr_chunks_kernel"
WALK = "triton_dplr_walk:dplr_walk_kernel"
WRITTEN = "triton_dplr_walk:dplr_written_kernel"
GRADIENTS = "triton_dplr_steps:dplr_gradients_kernel"

FAULTS = (
    Fault(
        "rwkv7: a reads the state after the decay of its token",
        "triton_dplr:entering",
        "$since - $w if BEFORE else $since",
        "$since",
        f"{TESTS} -k strong_decays",
    ),
    Fault(
        "rwkv7: a reads the state after the decay of its token, in float32",
        "triton_dplr:entering",
        "$i if BEFORE else $i + 1",
        "$i + 1",
        f"{TESTS} -k every_size",
    ),
    Fault(
        "rwkv7: a document that begins inside a chunk reads the state before it",
        "triton_dplr:entering",
        "tl.where($enters[:, None], tl.exp(tl.minimum($e, 0.0)), 0.0)",
        "tl.exp(tl.minimum($e, 0.0))",
        f"{TESTS} -k documents",
    ),
    Fault(
        "rwkv7: an old document leaves its chunk",
        "triton_dplr:leaving",
        "tl.where($leaves[:, None], tl.exp(tl.minimum($e, 0.0)), 0.0)",
        "tl.exp(tl.minimum($e, 0.0))",
        f"{TESTS} -k documents",
    ),
    Fault(
        "rwkv7: what is written passes its token's own decay",
        "triton_dplr:leaving",
        "$i + 1",
        "$i",
        f"{TESTS} -k every_size",
    ),
    Fault(
        "rwkv7: the middle of a block is off for what writes",
        "triton_dplr:block_decays",
        "tl.exp(tl.minimum(-$e, $most))",
        "tl.exp(tl.minimum(0.5 - $e, $most))",
        f"{TESTS} -k blocks_the_sums",
    ),
    Fault(
        "rwkv7: the middle of a block has eight bits, and what reads and writes each its own",
        "triton_dplr:block_decays",
        "tl.exp(tl.minimum(-$e, $most))",
        "tl.exp(tl.minimum(-$e.to(tl.bfloat16).to(tl.float32), $most))",
        f"{TESTS} -k blocks_the_sums",
    ),
    Fault(
        "rwkv7: within a level a reads after its own decay",
        "triton_dplr:level_decays",
        "tl.where($late, $i, $middle)",
        "tl.where($late, $i + 1, $middle)",
        f"{TESTS} -k every_size",
    ),
    Fault(
        "rwkv7: the inverse has the other sign",
        CHUNKS,
        "tl.where($same, -$ab, 0.0)",
        "tl.where($same, $ab, 0.0)",
        f"{TESTS} -k every_size",
    ),
    Fault(
        "rwkv7: a reads what another document has written",
        CHUNKS,
        "tl.where($same, -$ab, 0.0)",
        "-$ab",
        f"{TESTS} -k documents",
    ),
    Fault(
        "rwkv7: outputs lack what b writes in their chunk for the state before it",
        CHUNKS,
        "$wide = tl.dot($of_b, $keeps, $wide, input_precision=PRECISION)",
        "",
        f"{TESTS} -k every_size",
    ),
    Fault(
        "rwkv7: a sequence starts from where the one before it ended",
        WALK,
        "$state = tl.where($enters, 0.0, $state)",
        "",
        f"{TESTS} -k packed",
    ),
    Fault(
        "rwkv7: what a reads is not solved for in its gradient",
        WRITTEN,
        "tl.dot($solve, $du, input_precision=PRECISION).to($du.dtype)",
        "$du",
        f"{TESTS} -k correlated",
    ),
    Fault(
        "rwkv7: the gradient of a decay has a's read of its own token",
        GRADIENTS,
        "tl.cumsum($dw, 0, reverse=True) + $total[None, :] - $by_earlier",
        "tl.cumsum($dw, 0, reverse=True) + $total[None, :]",
        f"{TESTS} -k blocks_the_sums",
    ),
    Fault(
        "rwkv7: the gradient of a decay lacks what passes the whole chunk",
        GRADIENTS,
        "$total *= tl.load($d_whole + $index * H + $h, mask=$h < H, other=0.0)",
        "$total *= 0.0",
        f"{TESTS} -k every_size",
    ),
    Fault(
        "rwkv7: gradients of pairs across documents",
        GRADIENTS,
        "$same = $run[:, None] == $run[None, :]",
        "$same = $run[:, None] >= $run[None, :]",
        f"{TESTS} -k documents",
    ),
)
