"""`python -m launch.export run.dir=outputs/run to=DIR`: writes a run's parameters as transformers reads them."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.errors import DONE, run_command
from launch.train import unraisable
from recipes.words import meaning, of_flag

USAGE = """usage: python -m launch.export run.dir=DIR to=DIR [KEY=VALUE ...]
       python -m launch.export from=DIR

  python -m launch.export run.dir=outputs/run to=outputs/run_hf dtype=bfloat16
  python -m launch.export from=models/Qwen3-8B

The first writes safetensors and config.json from a run's last checkpoint. The second prints the overrides with which a recipe
has the model of a folder's config.json, to train on from it with model.init_from=DIR.

keys:
  run.dir=DIR                  the run, or its checkpoint.dir, which may be gs://BUCKET/FOLDER
  to=DIR                       the folder to make
  step=N                       of the checkpoint; default: the last
  dtype=float32                or bfloat16
  data.tokenizer=FILE          the tokenizer.json that the run was trained with: it is copied, with what stands beside it
  max_position_embeddings=N    for config.json; default: the run's data.sequence_length, or the longer context of
                               model.rope_scaling yarn or llama3
  plugins=[MODULE]             modules that register layers; those that the run names are imported without it
  from=DIR                     a folder with a config.json
"""
_EXPORT = ("run.dir", "to", "step", "dtype", "data.tokenizer", "max_position_embeddings", "plugins")
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


def _keys(arguments: Sequence[str]) -> dict[str, str]:
    """Parses the command line. Raises ValueError for unknown or conflicting keys."""
    from ejdist.dtypes import dtype_name

    found: dict[str, str] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name not in (known := (*_EXPORT, "from")):
            meant = of_flag(name, value or None, known) if name.startswith("-") else meaning(name, known)
            if meant:
                raise ValueError(f"unknown {'flag' if name.startswith('-') else 'key'} {name!r}; {meant}")
        if name not in (*_EXPORT, "from") or not equals or not value:
            raise ValueError(f"cannot read {argument!r}: write KEY=VALUE, with one of {', '.join((*_EXPORT, 'from'))}")
        if name in found:
            raise ValueError(f"{name} is given twice; give it once")
        found[name] = dtype_name(value) if name == "dtype" else value
    if "from" in found:
        if len(found) > 1:
            raise ValueError("from=DIR prints the model of a folder, and takes no other key")
    elif not {"run.dir", "to"} <= set(found):
        raise ValueError("give run.dir=DIR and to=DIR, or from=DIR; --help has examples")
    return found


def _number(keys: dict[str, str], name: str) -> int | None:
    if name not in keys:
        return None
    if not re.fullmatch("[0-9]{1,18}", keys[name]) or int(keys[name]) < 1:
        raise ValueError(f"{name} = {keys[name]!r} must be a positive number")
    return int(keys[name])


def print_recipe(folder: str) -> None:
    """Prints the overrides that make the default recipe's model that of a config.json.

    Raises:
      ValueError: it cannot be read, or is of a model that is not one here.
    """
    from ejdist.paths import check_folder
    from ejdist.weights.families import read_config
    from ejdist.weights.match import overrides
    from recipes.arguments import RecipeError, check_values, quoted
    from recipes.schema import compose

    check_folder("from", folder)
    family, section = read_config(Path(folder).expanduser())
    print(f"# {family.model_type}; over model=nano, the model of a recipe that names no other")
    start = f"model.init_from={folder}"
    try:
        plain = check_values([start]) == [start]
    except RecipeError:
        plain = False
    if not plain:
        start = f"model.init_from={quoted(folder)}"
    for line in [*overrides(section, compose(["model=nano"]).model), start]:
        print(shlex.quote(line))


def export(keys: dict[str, str]) -> None:
    """Writes a run's parameters. Raises ValueError, CheckpointError or OSError for errors that a user can fix."""
    import jax
    import numpy as np

    from ejdist.paths import check_folder
    from ejdist.training.data.tokenizer import ByteTokenizer, FileTokenizer
    from ejdist.training.runs import Run
    from ejdist.weights.tensors import declared_leaves
    from ejdist.weights.writer import check_target, save

    for key in ("to", "data.tokenizer"):
        check_folder(key, keys.get(key), "give a folder, and copy from there or to there")
    length, step = _number(keys, "max_position_embeddings"), _number(keys, "step")
    to = Path(keys["to"]).expanduser().absolute()
    check_target(to)
    run = Run(keys["run.dir"], step)
    if Path(run.kept_in).resolve() in (to.resolve(), *to.resolve().parents):
        raise ValueError(
            f"to = {keys['to']!r} is in {run.kept_in}, which holds checkpoints and nothing else: name a folder next to it"
        )
    c, more, beside, told = run.model, {}, {}, ""
    if "data.tokenizer" in keys:
        path = Path(keys["data.tokenizer"]).expanduser()
        tokenizer = FileTokenizer(path)
        if tokenizer.fingerprint != run.data["tokenizer"]:
            raise ValueError(
                f"data.tokenizer = {str(path)!r} is not the file that the run was trained with; give that one, or leave it out"
            )
        more["eos_token_id"] = tokenizer.eos_id
        beside = {"tokenizer.json": path} | {n: path.with_name(n) for n in _BESIDE if path.with_name(n).exists()}
    elif run.data["tokenizer"] == ByteTokenizer.fingerprint:
        more["eos_token_id"] = ByteTokenizer.eos_id
        told = "no tokenizer is written: data.tokenizer=bytes, ids 0 to 255 and 256 for the end, has no tokenizer file"
    else:
        told = "no tokenizer is written: give data.tokenizer=FILE, the tokenizer.json that the run was trained with"
    # Of linear and ntk nothing says from which context they scale.
    scaled = int(c.rope_factor * c.rope_original_length) if c.rope_scaling in ("yarn", "llama3") else 0
    more["max_position_embeddings"] = length or max(scaled, run.data["sequence_length"])
    # The parameters are read one after the other onto this machine, whatever mesh they were trained on.
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = declared_leaves(c)

    def leaf(name: str) -> np.ndarray:
        like = jax.ShapeDtypeStruct(leaves[name].shape, leaves[name].dtype, sharding=here)
        return np.asarray(run.load({name: like})[name])

    try:
        name = save(to, c, leaf, dtype=keys.get("dtype", "float32"), more=more, beside=beside)
    finally:
        run.close()
    count = sum(p.size for p in leaves.values())
    print(f"{name}, step {run.step}: {count:,} parameters as {keys.get('dtype', 'float32')} in {to}")
    if told:
        print(told)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_command(argv, _main, lambda _: USAGE, needs_arguments=False, recipe=False)


def _main(arguments: list[str]) -> int:
    from recipes.plugins import load_named

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    load_named(arguments)
    keys = _keys(arguments)
    if "from" in keys:
        print_recipe(keys["from"])
    else:
        import jax

        jax.config.update("jax_platforms", "cpu")  # it moves numbers from disk to disk
        export(keys)
    return DONE


if __name__ == "__main__":
    sys.unraisablehook = unraisable  # of a checkpoint that cannot be read
    sys.exit(main())
