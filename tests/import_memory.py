"""`python tests/import_memory.py FOLDER LAYERS`: prints what an import takes of memory beyond the parameters, as JSON.

The peak of resident memory while a model is read, less what is resident when it has been, in MiB: the kernel counts both, with
the pages of the files that are mapped. Files are bfloat16, and parameters float32. Needs Linux.
"""

import gc
import json
import sys
from pathlib import Path

import jax
import numpy as np

from ejdist.models.decoder import DecoderConfig
from ejdist.training.start import open_source
from ejdist.weights.families import family_of
from ejdist.weights.files import DTYPES, Files
from ejdist.weights.tensors import declared_leaves, expand


def resident(key):
    """Returns a line of /proc/self/status in MiB: VmRSS now, VmHWM its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) / 1024


def write(folder, c):
    """Writes a model of equal numbers, a tensor at a time."""
    name, family = family_of(c)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [name]} | family.config(c)))
    tensors = expand(family.rules[0], c)
    files = Files(folder, {t.name: (DTYPES["BF16"], t.shape) for t in tensors}, 64 << 20)
    for t in tensors:
        files.write(t.name, np.full(t.shape, 0.5, DTYPES["BF16"]))
    files.close()
    return tensors


def main(folder, layers):
    jax.config.update("jax_platforms", "cpu")
    c = DecoderConfig(
        vocab_size=512, num_layers=layers, model_dim=512, num_heads=8, num_kv_heads=8, head_dim=64, ffn_dim=2048
    )
    tensors = write(Path(folder) / str(layers), c)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {n: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=where) for n, p in declared_leaves(c).items()}
    source = open_source(str(Path(folder) / str(layers)), c)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    found = source.load(like)
    jax.block_until_ready(found)
    kept = sum(x.nbytes for x in found.values()) / 2**20
    row = {
        "layers": layers,
        "parameters_MiB": round(kept, 1),
        "largest_tensor_MiB": max(2 * int(np.prod(t.shape)) for t in tensors) / 2**20,
        "largest_parameter_MiB": max(x.nbytes for x in found.values()) / 2**20,
        "beyond_MiB": round(resident("VmHWM") - resident("VmRSS"), 1),
        "grown_MiB": round(resident("VmRSS") - before, 1),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
