"""`python -m launch.export run.dir=outputs/run to=DIR`: writes a run as a folder that transformers and others load."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.errors import DONE, run_command
from launch.train import unraisable
from recipes.words import meaning, of_flag

USAGE = """usage: python -m launch.export run.dir=DIR to=DIR [KEY=VALUE ...]
       python -m launch.export from=DIR

  python -m launch.export run.dir=outputs/run to=outputs/run_hf dtype=bfloat16
  python -m launch.export from=models/Qwen3-8B

The first writes a folder that transformers and others load: safetensors, config.json, generation_config.json, and the files of
the tokenizer and its chat template, as the folder of model.init_from had them. The second prints the overrides with which a
recipe has the model of a folder's config.json, to train on from it with model.init_from=DIR.

keys:
  run.dir=DIR                  the run, or its checkpoint.dir, which may be gs://BUCKET/FOLDER
  to=DIR                       the folder to make
  step=N                       of the checkpoint; default: the last
  dtype=float32                or bfloat16
  adapter=peft                 of a run with lora.rank: its adapters alone, as PEFT reads them; default: the model with these
                               merged into its matrices
  data.tokenizer=FILE          the tokenizer.json that the run was trained with, if it is no longer where the run had it
  max_position_embeddings=N    for config.json; default: the longest of the source's, of the rows that the run trained, and of
                               what model.rope_scaling yarn or llama3 reaches
  plugins=[MODULE]             modules that register layers; those that the run names are imported without it
  from=DIR                     a folder with a config.json
"""
_EXPORT = ("run.dir", "to", "step", "dtype", "adapter", "data.tokenizer", "max_position_embeddings", "plugins")
_ADAPTER = ("run.dir", "to", "step", "dtype", "adapter", "plugins")  # the keys beside adapter=


def _keys(arguments: Sequence[str]) -> dict[str, str]:
    """Parses the command line. Raises ValueError for unknown or conflicting keys."""
    from ejdist.dtypes import dtype_name

    options: dict[str, str] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name not in (known := (*_EXPORT, "from")):
            meant = of_flag(name, value or None, known) if name.startswith("-") else meaning(name, known)
            if meant:
                raise ValueError(f"unknown {'flag' if name.startswith('-') else 'key'} {name!r}; {meant}")
        if name not in (*_EXPORT, "from") or not equals or not value:
            raise ValueError(f"cannot read {argument!r}: write KEY=VALUE, with one of {', '.join((*_EXPORT, 'from'))}")
        if name in options:
            raise ValueError(f"{name} is given twice; give it once")
        options[name] = dtype_name(value) if name == "dtype" else value
    if "from" in options:
        if len(options) > 1:
            raise ValueError("from=DIR prints the model of a folder, and takes no other key")
    elif "adapter" in options:
        if options["adapter"] != "peft":
            raise ValueError(f"adapter = {options['adapter']!r} is unknown; use peft, or leave it out")
        if beside := [name for name in options if name not in _ADAPTER]:
            raise ValueError(f"adapter=peft writes adapters alone, and does not read {beside[0]}: leave it out")
    if "from" not in options and not {"run.dir", "to"} <= set(options):
        raise ValueError("give run.dir=DIR and to=DIR, or from=DIR; --help has examples")
    return options


def _number(keys: dict[str, str], name: str) -> int | None:
    if name not in keys:
        return None
    if not re.fullmatch("[0-9]{1,18}", keys[name]) or int(keys[name]) < 1:
        raise ValueError(f"{name} = {keys[name]!r} must be a positive number")
    return int(keys[name])


def print_recipe(folder: str) -> None:
    """Prints the overrides that make the default recipe's model that of a config.json, in the dtype of its weights and with its
    tokenizer: a terminal shows them as they are pasted, and $(...) takes them as they are.

    Raises:
      ValueError: it cannot be read, or is of a model that is not one here.
    """
    from ejdist.paths import check_folder
    from ejdist.weights.match import overrides
    from ejdist.weights.published import read_published
    from recipes.arguments import assigned, in_shell
    from recipes.schema import compose

    check_folder("from", folder)
    where = Path(folder).expanduser()
    published = read_published(where)
    print(
        f"# {published.family.model_type}; over model=nano, the model of a recipe that names no other", file=sys.stderr
    )
    lines = overrides(published.model, compose(["model=nano"]).model)
    lines += [f"model.compute_dtype={published.computed_in()}", assigned("model.init_from", folder)]
    lines += [assigned("data.tokenizer", folder)] if (where / "tokenizer.json").is_file() else []
    for line in lines:
        print(in_shell([line]) if sys.stdout.isatty() else _word(line))


def _word(text: str) -> str:
    """Returns a word as a shell takes it from $(...), where quotes would be part of it."""
    return text if re.fullmatch(r"[\w.,:=/@%+~\[\]-]+", text) else shlex.quote(text)


def export(keys: dict[str, str]) -> None:
    """Writes a run's parameters. Raises ValueError, CheckpointError or OSError for errors that a user can fix."""
    import jax

    from ejdist.paths import check_folder
    from ejdist.training.beside import beside_of
    from ejdist.training.checkpoint_rows import layer_by_layer
    from ejdist.training.runs import Run
    from ejdist.weights.tensors import declared_leaves
    from ejdist.weights.writer import check_target, save

    for key in ("to", "data.tokenizer"):
        check_folder(key, keys.get(key), "give a folder, and copy from there or to there")
    length, step = _number(keys, "max_position_embeddings"), _number(keys, "step")
    to = Path(keys["to"]).expanduser().absolute()
    check_target(to)
    run = Run(keys["run.dir"], step)
    if "adapter" in keys:
        export_adapter(run, to, keys.get("dtype", "float32"))
        return
    if Path(run.kept_in).resolve() in (to.resolve(), *to.resolve().parents):
        raise ValueError(
            f"to = {keys['to']!r} is in {run.kept_in}, which holds checkpoints and nothing else: name a folder next to it"
        )
    c, dtype = run.model, keys.get("dtype", "float32")
    beside = beside_of(run, keys.get("data.tokenizer"), length)
    leaves = declared_leaves(c)
    try:
        arrays = run.open({name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in leaves.items()})

        def check() -> None:
            for array in arrays.values():
                array.check()

        name = save(
            to, c, lambda leaf: run.rows(leaf, arrays), dtype=dtype, more=beside.config, beside=beside.files,
            architecture=beside.architecture, by_layer=layer_by_layer(arrays), check=check,
        )  # fmt: skip
    finally:
        run.close()
    count = sum(p.size for p in leaves.values())
    print(f"{name}, step {run.step}: {count:,} parameters as {dtype} in {to}")
    for line in beside.notes:
        print(line)


def export_adapter(run: Any, to: Path, dtype: str) -> None:
    """Writes the adapters of a run. Raises as `export`."""
    from ejdist.models.lora import declare_adapter
    from ejdist.models.stack import declare_layers
    from ejdist.weights.peft import save_adapter

    if run.merged is None:
        raise ValueError(f"adapter=peft: the run in {run.folder} has no adapters (lora.rank = 0); leave adapter out")
    layers = declare_layers(run.model)
    shapes = {
        f"params.layers.{name}.{part}": p
        for name in run.merged.targets
        for part, p in declare_adapter(layers[name], run.lora.rank).items()
    }
    base = run.recipe.get("model.init_from")
    published = base is not None and (Path(base).expanduser() / "config.json").exists()
    try:
        arrays = run.stored(shapes)
        count = save_adapter(to, run.model, run.lora, arrays.__getitem__, dtype=dtype, base=base if published else None)
    finally:
        run.close()
    print(f"step {run.step}: {count:,} numbers of adapters as {dtype} in {to}")
    if not published:
        print(
            f"base_model_name_or_path is null: model.init_from = {base!r} is no folder with a config.json here; write its name"
        )
    if run.lora.base == "int8":
        print("they were trained beside a base in int8, and PEFT adds them to the one that it loads")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_command(argv, _main, lambda _: USAGE, needs_arguments=False, recipe=False)


def _main(arguments: list[str]) -> int:
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    keys = _keys(arguments)
    if "plugins" in keys:
        from recipes.plugins import load_named

        load_named(arguments)
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
