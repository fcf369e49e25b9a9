"""`python tests/export_memory.py FOLDER LAYERS [WIDTH]`: prints what an export takes of memory, as JSON.

The peak of resident memory while a run is exported, less what is resident before, in MiB. Another run is exported first, of the
same layers, so that what is imported and compiled once is not counted. Needs Linux.
"""

import gc
import json
import subprocess
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


def model(layers, width=256):
    """Returns a model whose layers have three matrices of 16 width^2 bytes, 1 MiB, and little else."""
    return DecoderConfig(
        vocab_size=512, num_layers=layers, model_dim=width, num_heads=4, num_kv_heads=4, head_dim=16, ffn_dim=4 * width
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


def measured(folder, layers, width=256, **options):
    """Writes runs of 2 and of `layers` layers and exports them in a process of its own, the second to folder/to. Returns the
    printed row.

    Args:
      options: of the process.
    """
    write(folder / "warm", model(2, width))
    leaves = write(folder / "run", model(layers, width))
    names = [str(folder / name) for name in ("warm", "to_warm", "run", "to")]
    command = [sys.executable, str(Path(__file__).resolve()), *names]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        raise RuntimeError(done.stderr)
    largest = max(x.nbytes for x in leaves.values())
    row = {
        "layers": layers,
        "parameters_MiB": round(sum(x.nbytes for x in leaves.values()) / 2**20, 1),
        "largest_stack_MiB": largest / 2**20,
        "largest_of_a_layer_MiB": largest / 2**20 / layers,
    }
    return row | json.loads(done.stdout.splitlines()[-1])


def export_all(*arguments):
    """Exports runs, and prints what the last took."""
    from launch.export import export

    jax.config.update("jax_platforms", "cpu")
    before = 0
    for run, to in zip(arguments[::2], arguments[1::2], strict=True):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident("VmRSS")
        export({"run.dir": run, "to": to})
    print(json.dumps({"beyond_MiB": round(resident("VmHWM") - before, 1)}))


if __name__ == "__main__":
    if sys.argv[2].isdigit():
        print(json.dumps(measured(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
    else:
        export_all(*sys.argv[1:])
