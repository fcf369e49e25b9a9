"""Faults of the Triton kernels of recurrences with decays of channels."""

from faults import Fault

CHANNELS = "tests/kernels/test_channel_triton.py"

FAULTS = (
    Fault(
        "channels: a level reaches into another block",
        "triton_channel_steps:level",
        "$late[:, None] & ($i < $middle)[None, :] & ($middle[:, None] == $middle[None, :])",
        "$late[:, None] & ($i < $middle)[None, :] & ($middle[:, None] >= $middle[None, :])",
        f"{CHANNELS} -k 'every_size and inf'",
    ),
    Fault(
        "channels: a write fades by its own decay",
        "triton_channel_steps:level_decay",
        "tl.where($late, $middle, $i + 1)",
        "tl.where($late, $middle, $i)",
        f"{CHANNELS} -k 'every_size and inf'",
    ),
    Fault(
        "channels: a bonus reads the state after the decay of its token",
        "triton_channel_steps:level_decay",
        "$i if BEFORE else $i + 1",
        "$i + 1",
        f"{CHANNELS} -k bonus_reads",
    ),
    Fault(
        "channels: the middle of a block is its beginning",
        "triton_channel_steps:middle_decay",
        "load_rows($sums_at, $here, $h, N, H, BLOCK_C) - 0.5 * ($low + $high)",
        "load_rows($sums_at, $here, $h, N, H, BLOCK_C) - $low",
        f"{CHANNELS} -k largest",
    ),
    Fault(
        "channels: blocks are taken whatever their sums are",
        "triton_channel_steps:first_level",
        "$found = tl.where(tl.min($total, 0) >= -REACH, LEVELS, $found)",
        "$found = LEVELS",
        f"{CHANNELS} -k largest",
    ),
    Fault(
        "channels: blocks of 16 are taken where half of them are narrow",
        "triton_channel_steps:first_level",
        "tl.where(tl.min(tl.min($of_16, 1), 0) >= -REACH, 4, $found)",
        "tl.where(tl.max(tl.min($of_16, 1), 0) >= -REACH, 4, $found)",
        f"{CHANNELS} -k largest",
    ),
    Fault(
        "channels: pairs of blocks reach across them",
        "triton_channel_steps:within_blocks",
        "$t // $size == $s // $size",
        "$t // $size >= $s // $size",
        f"{CHANNELS} -k largest",
    ),
    Fault(
        "channels: a state enters a document that begins inside a chunk",
        "triton_channels:channel_decays_kernel",
        "tl.where($enters, $q.to(tl.float32) * tl.exp($reading) * SCALE, 0.0)",
        "$q.to(tl.float32) * tl.exp($reading) * SCALE",
        f"{CHANNELS} -k documents",
    ),
    Fault(
        "channels: an old document leaves its chunk",
        "triton_channels:channel_decays_kernel",
        "tl.where($leaves, $k.to(tl.float32) * tl.exp(tl.minimum($until_end, 0.0)), 0.0)",
        "$k.to(tl.float32) * tl.exp(tl.minimum($until_end, 0.0))",
        f"{CHANNELS} -k documents",
    ),
    Fault(
        "channels: a delta rule reads what an old document left",
        "triton_channels:channel_decays_kernel",
        "tl.where($enters, $k.to(tl.float32) * tl.exp($since), 0.0)",
        "$k.to(tl.float32) * tl.exp($since)",
        f"{CHANNELS} -k documents",
    ),
    Fault(
        "channels: pairs are seen across documents",
        "triton_channels:channel_pairs_kernel",
        "$same = $run[:, None] == $run[None, :]",
        "$same = $run[:, None] >= $run[None, :]",
        f"{CHANNELS} -k documents",
    ),
    Fault(
        "channels: the gradient of a decay lacks what passes the whole chunk",
        "triton_channel_steps:channel_gradients_kernel",
        "$total *= tl.load($d_whole + $index * H + $h, mask=$h < H, other=0.0)",
        "$total *= 0.0",
        f"{CHANNELS} -k 'every_size and inf'",
    ),
    Fault(
        "channels: the gradient of beta has one block of channels",
        "triton_channel_calls:Chunks.gradients",
        'jnp.sum($d["beta"], axis=0)',
        '$d["beta"][0]',
        f"{CHANNELS} -k several_blocks",
    ),
    Fault(
        "channels: an outer sum overflows into the gradient of beta",
        "triton_channel_steps:channel_step",
        "tl.where($wanted, $A * $d_solved, 0.0)",
        "$A * tl.where($wanted, $d_solved, 0.0)",
        f"{CHANNELS} -k 'largest and delta'",
    ),
    Fault(
        "channels: a write of an old document reaches the end of the chunk, in the gradient",
        "triton_channel_steps:channel_gradients_kernel",
        "tl.where($leaves, $d_leave.to(tl.float32) * tl.exp(tl.minimum($until_end, 0.0)), 0.0)",
        "$d_leave.to(tl.float32) * tl.exp(tl.minimum($until_end, 0.0))",
        f"{CHANNELS} -k documents",
    ),
)
