"""Faults of data, the step and the loop."""

from faults import Fault

STEPS = "ejdist/training/steps.py"
TRAIN = "tests/test_train.py"
DECODER, MODEL, STACK = (f"ejdist/models/{name}.py" for name in ("decoder", "model", "stack"))
STEP_OF_LAYERS = "tests/test_layers.py -k step_of_mixed"

FAULTS = (
    Fault(
        "every rank of a sequence has the whole state",
        "ejdist/layout.py",
        '"D": (FSDP, SP)',
        '"D": (FSDP,)',
        f"{TRAIN} -k split_over_the_sequence",
    ),
    Fault(
        "the learning rate in the rows is that of the step after",
        "ejdist/training/step.py",
        "schedule(state.step)",
        "schedule(state.step + 1)",
        "tests/test_resume.py -k cosine",
    ),
    Fault(
        "the forward writes every weight again for the backward",
        STACK,
        "return run(x, own, at_layer",
        "return run(x, jax.tree.map(lambda w: w + 0, own), at_layer",
        "tests/test_layers.py -k second_copy",
    ),
    Fault(
        "the MLP computes its products again where all are kept",
        "ejdist/models/feedforward.py",
        "if not REMAT[c.remat].products:",
        "if True:",
        "tests/test_model.py -k computes_again",
    ),
    Fault(
        "a profile counts kernels that run side by side twice",
        "benchmarks/step.py",
        "busy = sum(map(union, spans.values())) * parts",
        "busy = sum(b - a for s in spans.values() for a, b in s) * parts",
        "tests/test_benchmarks.py -k told_apart",
    ),
    Fault(
        "a way of splitting a sequence is timed though its numbers are wrong",
        "benchmarks/sequence.py",
        "if not error <= limit:",
        "if False:",
        "tests/test_benchmarks.py -k split_sequence",
    ),
    Fault(
        "targets cross documents",
        "ejdist/training/data/packing.py",
        "(0 if whole else 1)",
        "1",
        "tests/test_data.py",
    ),
    Fault(
        "data from the start after a stop",
        STEPS,
        "data.iterator(start, end, rows,",
        "data.iterator(0, end - start, rows,",
        f"{TRAIN} -k bit_for_bit",
    ),
    Fault(
        "the loop counts FLOPs as if a row were one document",
        STEPS,
        'step_flops(program.model.flops, batch["segment_ids"])',
        'step_flops(program.model.flops, batch["segment_ids"] * 0)',
        f"{TRAIN} -k flops",
    ),
    Fault(
        "a loss that is no number goes on",
        "ejdist/training/guards.py",
        "if not (math.isfinite(loss) and",
        "if (loss is None and",
        f"{TRAIN} -k no_number",
    ),
    Fault(
        "a digest without places",
        "ejdist/training/integrity.py",
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
        'count = jnp.maximum(found["tokens"].value, 1)',
        'count = jnp.maximum(found["tokens"].value / accumulation, 1)',
        "tests/test_step.py",
    ),
    Fault(
        "a layer's loss counted twice",
        DECODER,
        'for m in of_layers.values() if m.how == "loss"',
        'for m in (*of_layers.values(), *of_layers.values()) if m.how == "loss"',
        STEP_OF_LAYERS,
    ),
    Fault(
        "a layer's loss reported and not trained on",
        STACK,
        'm = m if m.how == "loss" else',
        "m =",
        STEP_OF_LAYERS,
    ),
    Fault(
        "a max over microbatches that is a sum",
        MODEL,
        'join = jnp.maximum if self.how == "max" else jnp.add',
        "join = jnp.add",
        STEP_OF_LAYERS,
    ),
    Fault(
        "a max over layers that is a sum",
        MODEL,
        '(jnp.max if self.how == "max" else jnp.sum)',
        "jnp.sum",
        STEP_OF_LAYERS,
    ),
    Fault(
        "buffers that stay as they were",
        "ejdist/training/step.py",
        "params, opt_state, buffers)\n        if skip",
        "params, opt_state, state.buffers)\n        if skip",
        STEP_OF_LAYERS,
    ),
    Fault(
        "buffers moved by the last microbatch alone",
        "ejdist/training/step.py",
        "m.plus(more[name])",
        'more[name] if m.how == "update" else m.plus(more[name])',
        STEP_OF_LAYERS,
    ),
    Fault(
        "a loss hears of the step after it",
        "ejdist/training/step.py",
        "StepContext(state.step,",
        "StepContext(state.step + 1,",
        STEP_OF_LAYERS,
    ),
    Fault(
        "an incomplete round with the rows of the first",
        STACK,
        "row(name, first[name] + rounds * each[name] + i)",
        "row(name, first[name] + i)",
        STEP_OF_LAYERS,
    ),
    Fault(
        "what a part asks remat to keep is not kept",
        "ejdist/models/remat.py",
        "policies.save_only_these_names(*offloads, *saves)",
        "policies.save_only_these_names(*saves)",
        "tests/test_model.py -k computed_again",
    ),
    Fault(
        "the compiler may sum whole gradients of microbatches",
        "ejdist/training/step.py",
        "grads = jax.lax.optimization_barrier(grads)",
        "pass",
        "tests/test_plan.py -k microbatches",
    ),
)
