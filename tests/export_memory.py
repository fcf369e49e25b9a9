"""`python tests/export_memory.py RUN TO [RUN TO ...]`: exports runs, and prints what the last took of memory, as JSON.

The peak of resident memory while it is exported, less what is resident before, in MiB. Runs before it have the same layers, so
that what is imported and compiled once is not counted. Needs Linux.
"""

import gc
import json
import sys
from pathlib import Path

import jax
import numpy as np
from import_memory import resident

from ejdist.models.decoder import DecoderConfig
from ejdist.sections import flat
from ejdist.training.checkpoint import Checkpoints, CheckpointSection
from ejdist.training.runs import nested
from ejdist.weights.tensors import declared_leaves


def model(layers):
    """Returns a model whose layers have three matrices of 1 MiB, and little else."""
    return DecoderConfig(
        vocab_size=512, num_layers=layers, model_dim=256, num_heads=4, num_kv_heads=4, head_dim=16, ffn_dim=1024
    )


def write(folder, c, recipe=None, **more):
    """Writes a run with a checkpoint of step 1, without its optimizer. Returns its parameters: numbers that repeat every
    65,521, so that they compress, and no two layers are the same.

    Args:
      recipe, more: keys of its recipe, and what else its checkpoint has of it.
    """
    numbers = np.random.default_rng(0).standard_normal(65_521, np.float32)
    leaves = {name: np.resize(numbers, p.shape) for name, p in declared_leaves(c).items()}
    recipe = (recipe or {}) | {
        f"model.{key}": list(value) if isinstance(value, tuple) else value for key, value in flat(c).items()
    }
    saves = Checkpoints(folder, CheckpointSection())
    beside = {"recipe": recipe, "data": {"step": 1, "tokenizer": "bytes-1", "sequence_length": 64}}
    saves.save(1, jax.tree.map(jax.numpy.asarray, nested(leaves)), {**beside, **more})
    saves.close()
    return leaves


def main(*arguments):
    from launch.export import export

    jax.config.update("jax_platforms", "cpu")
    before = 0
    for run, to in zip(arguments[::2], arguments[1::2], strict=True):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident("VmRSS")
        export({"run.dir": run, "to": to})
    print(json.dumps({"before_MiB": round(before, 1), "beyond_MiB": round(resident("VmHWM") - before, 1)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
