"""A training run small enough for a test."""

from pathlib import Path

from ejdist.training.metrics import read_rows

TINY = [
    "recipe=long_context",
    *("model.num_layers=2", "model.model_dim=32", "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=8"),
    *("model.ffn_dim=48", "data.sequence_length=64", "data.global_batch=2", "optimizer.warmup_steps=2", "run.steps=10"),
    *("checkpoint.every=0", "mesh.sp=2", "sequence.order=zigzag"),
]
# One small program for one device, whatever run.steps is: for tests of what a run does beside its steps.
PLAIN = [*TINY, "mesh.sp=1", "model.num_layers=1", "optimizer.schedule=constant"]
# Short rows, so that stages and changes fit into a few steps.
SMALL = [*PLAIN, "run.steps=6", "data.sequence_length=32", "checkpoint.keep=9", "optimizer.warmup_steps=1"]


def losses(directory):
    return [row["loss"] for row in read_rows(Path(directory) / "metrics.jsonl")]


def run(directory, *overrides):
    """Trains SMALL in a folder, and returns (how it ended, what it has logged)."""
    from ejdist.training.loop import train
    from recipes.schema import compose

    said = []
    outcome = train(compose([*SMALL, f"run.dir={directory}", *overrides]), log=said.append)
    return outcome, "\n".join(said)
