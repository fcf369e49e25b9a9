"""Faults of data, the step and the loop."""

from faults import Fault

TRAIN = "tests/test_train.py"
DECODER, MODEL, STACK = (f"ejdist/models/{name}.py" for name in ("decoder", "model", "stack"))
STEP_OF_LAYERS = "tests/test_layers.py -k step_of_mixed"

FAULTS = (
    Fault(
        "every rank of a sequence has the whole state",
        "PARAMETERS",
        "{'D': (FSDP, *SEQUENCE_AXES), 'R': (FSDP, *SEQUENCE_AXES), 'N': (TP,), 'K': (TP,), 'F': (TP,), 'V': (TP,), "
        "'E': (EP,)}",
        "{'D': (FSDP,), 'R': (FSDP, *SEQUENCE_AXES), 'N': (TP,), 'K': (TP,), 'F': (TP,), 'V': (TP,), 'E': (EP,)}",
        f"{TRAIN} -k split_over_the_sequence",
    ),
    Fault(
        "the learning rate in the rows is that of the step after",
        "make_train_step.train_step",
        "$schedule($state.step)",
        "$schedule($state.step + 1)",
        "tests/test_resume.py -k cosine",
    ),
    Fault(
        "the forward writes every weight again for the backward",
        "run_layers.one_round",
        "run($x, $own, $at_layer, $pattern, in_scan=$rounds > 1)",
        "run($x, jax.tree.map(lambda w: w + 0, $own), $at_layer, $pattern, in_scan=$rounds > 1)",
        "tests/test_layers.py -k second_copy",
    ),
    Fault(
        "the MLP computes its products again where all are kept",
        "MLP.apply",
        "not REMAT[$c.remat].products",
        "True",
        "tests/test_model.py -k computes_again",
    ),
    Fault(
        "a device of no data sheet has the peak of another",
        "peak_flops",
        "[$name for $name in PEAKS if $device_kind.startswith($name)]",
        "[$name for $name in PEAKS if $device_kind.startswith($name)] or list(PEAKS)",
        f"{TRAIN} -k data_sheet",
    ),
    Fault(
        "the MFU of a device that has no peak is that of 1 FLOP/s",
        "summarise",
        "None if peak is None else causal / seconds / devices / peak",
        "causal / seconds / devices / (peak or 1.0)",
        f"{TRAIN} -k data_sheet",
    ),
    Fault(
        "a profile counts kernels that run side by side twice",
        "step:summary",
        "$busy = sum(map(union, $spans.values())) * $parts",
        "$busy = sum((b - a for s in $spans.values() for a, b in s)) * $parts",
        "tests/test_benchmarks.py -k told_apart",
    ),
    Fault("targets cross documents", "Packing.row", "0 if $whole else 1", "1", "tests/test_data.py"),
    Fault(
        "data from the start after a stop",
        "run_steps",
        "$data.iterator($start, $end, $$after)",
        "$data.iterator(0, $end - $start, $$after)",
        f"{TRAIN} -k bit_for_bit",
    ),
    Fault(
        "the loop counts FLOPs as if a row were one document",
        "run_steps",
        "step_flops($program.model.flops, $batch['segment_ids'])",
        "step_flops($program.model.flops, $batch['segment_ids'] * 0)",
        f"{TRAIN} -k flops",
    ),
    Fault(
        "a loss that is no number goes on",
        "Watch._check",
        "not (math.isfinite($loss) and math.isfinite($norm))",
        "$loss is None and math.isfinite($norm)",
        f"{TRAIN} -k no_number",
    ),
    Fault(
        "a digest without places",
        "_sum_of_hashes",
        "$bits.astype(jnp.uint32) + $place * jnp.uint32(2654435761)",
        "$bits.astype(jnp.uint32)",
        f"{TRAIN} -k digest",
    ),
    Fault(
        "the schedule ends a step late",
        "make_schedule",
        "$steps - 1 - $warmup",
        "$steps - $warmup",
        "tests/test_step.py",
    ),
    Fault(
        "accumulation forgets a microbatch's tokens",
        "make_train_step.train_step",
        "$found.get('terms', $found['tokens']).value",
        "$found.get('terms', $found['tokens']).value / accumulation",
        "tests/test_step.py",
    ),
    Fault(
        "a layer's loss counted twice",
        "Model.loss",
        "$of_layers.values()",
        "(*$of_layers.values(), *$of_layers.values())",
        STEP_OF_LAYERS,
    ),
    Fault(
        "a layer's loss reported and not trained on",
        "stack:_layer",
        "$m if $m.how == 'loss' else replace($m, value=jax.lax.stop_gradient($m.value))",
        "replace($m, value=jax.lax.stop_gradient($m.value))",
        STEP_OF_LAYERS,
    ),
    Fault(
        "a max over microbatches that is a sum",
        "Metric.plus",
        "jnp.maximum if self.how == 'max' else jnp.add",
        "jnp.add",
        STEP_OF_LAYERS,
    ),
    Fault(
        "a max over layers that is a sum",
        "Metric.over_layers",
        "jnp.max if self.how == 'max' else jnp.sum",
        "jnp.sum",
        STEP_OF_LAYERS,
    ),
    Fault(
        "buffers that stay as they were",
        "make_train_step.train_step",
        "TrainState($state.step + 1, $params, $opt_state, $buffers)",
        "TrainState($state.step + 1, $params, $opt_state, $state.buffers)",
        STEP_OF_LAYERS,
    ),
    Fault(
        "buffers moved by the last microbatch alone",
        "make_train_step.train_step.add",
        "$m.plus($more[$name])",
        "$more[$name] if $m.how == 'update' else $m.plus($more[$name])",
        STEP_OF_LAYERS,
    ),
    Fault(
        "a loss hears of the step after it",
        "make_train_step.gradient",
        "$state.step",
        "$state.step + 1",
        STEP_OF_LAYERS,
    ),
    Fault(
        "an incomplete round with the rows of the first",
        "run_layers",
        "$first[$name] + $rounds * $each[$name]",
        "$first[$name]",
        STEP_OF_LAYERS,
    ),
    Fault(
        "what a part asks remat to keep is not kept",
        "Remat.policy",
        "$policies.save_only_these_names(*$offloads, *$saves)",
        "$policies.save_only_these_names(*$saves)",
        "tests/test_model.py -k computes_again",
    ),
    Fault(
        "the compiler may sum whole gradients of microbatches",
        "make_train_step.train_step.add",
        "$grads = jax.lax.optimization_barrier($grads)",
        "pass",
        "tests/test_plan.py -m slow -k microbatches",
    ),
)
