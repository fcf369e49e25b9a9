"""Faults of data, the step and the loop."""

from faults import Fault

LOOP = "ejdist/training/loop.py"
TRAIN = "tests/test_train.py"

FAULTS = (
    Fault(
        "targets cross documents",
        "ejdist/training/data/packing.py",
        "(0 if whole else 1)",
        "1",
        "tests/test_data.py",
    ),
    Fault(
        "data from the start after a stop",
        LOOP,
        "data.iterator(start, end, rows)",
        "data.iterator(0, end - start, rows)",
        f"{TRAIN} -k bit_for_bit",
    ),
    Fault(
        "the loop counts FLOPs as if a row were one document",
        LOOP,
        'step_flops(program.config, batch["segment_ids"])',
        'step_flops(program.config, batch["segment_ids"] * 0)',
        f"{TRAIN} -k flops",
    ),
    Fault(
        "a loss that is no number goes on",
        "ejdist/training/stop.py",
        "if not (math.isfinite(loss) and",
        "if (loss is None and",
        f"{TRAIN} -k no_number",
    ),
    Fault(
        "a digest without places",
        "ejdist/training/checkpoint.py",
        "hashed = bits.astype(jnp.uint32) + place * jnp.uint32(0x9E3779B1)",
        "hashed = bits.astype(jnp.uint32)",
        f"{TRAIN} -k digest",
    ),
    Fault(
        "the schedule ends a step late",
        "ejdist/training/optimizer.py",
        "after = steps - 1 - warmup",
        "after = steps - warmup",
        "tests/test_step.py",
    ),
    Fault(
        "accumulation forgets a microbatch's tokens",
        "ejdist/training/step.py",
        'count = jnp.maximum(sums["tokens"], 1)',
        'count = jnp.maximum(sums["tokens"] / accumulation, 1)',
        "tests/test_step.py",
    ),
)
