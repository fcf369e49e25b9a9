"""What an export of a run writes beside its parameters: from the folder that the run's weights came from, and its tokenizer's.

Nothing is taken that has changed since: of a published folder that is gone or has other files the run has kept its own, a
tokenizer is known by its fingerprint in the checkpoint, a config.json by the model that it describes, a chat template by its
digest. What is gone or has changed is named in a line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ejdist.buckets import source_path
from ejdist.models.decoder import DecoderConfig
from ejdist.paths import is_url
from ejdist.sections import flat
from ejdist.training.chats.encoding import Chats
from ejdist.training.chats.folder import templates_of, tokens_of
from ejdist.training.chats.special_tokens import SpecialTokens
from ejdist.training.checkpoint_format import CheckpointError
from ejdist.training.data import default_cache_dir
from ejdist.training.data.dataset import MANIFEST, OWN, open_dataset
from ejdist.training.data.tokenizer import ByteTokenizer, FileTokenizer, tokenizer_file
from ejdist.training.data.tokenizer import fingerprint_of as _digest
from ejdist.training.kept import KEPT, files_kept, published_in
from ejdist.training.recorded import recorded
from ejdist.training.runs import Run
from ejdist.weights.beside import (
    GENERATION,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    as_list,
    context_of,
    ids_of,
    ids_of_tokenizer,
    read_if_there,
    source_context,
    text_of,
    tokenizer_config,
    tokenizer_files,
    vocabulary_of,
)
from ejdist.weights.families import FAMILIES, read_config
from ejdist.weights.files import read_json
from ejdist.weights.match import differences, written


@dataclass
class Beside:
    """What `ejdist.weights.writer.save` takes beside the parameters, and a line for each thing that the user should know."""

    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Path | str] = field(default_factory=dict)
    architecture: str | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Source:
    """The folder of Hugging Face that a run's weights came from, as it was then.

    folder: where its files are: what the run keeps of it, if it is gone or has changed. was: the folder that the run was given.
    """

    folder: Path
    was: Path
    config: dict[str, Any]
    generation: dict[str, Any]


def beside_of(run: Run, tokenizer: str | None = None, context: int | None = None) -> Beside:
    """Returns what belongs beside a run's parameters.

    Args:
      tokenizer: the tokenizer.json that the run was trained with; default: looked for where the run had it.
      context: max_position_embeddings; default: the longest that the source, the run's rows and its RoPE have.

    Raises:
      ValueError: the tokenizer is another, or a file beside it cannot be read.
    """
    beside, settings = Beside(), recorded(str(run.folder)) | run.recipe
    source = _source_of(run, beside.notes)
    path = _tokenizer_of(run, settings, tokenizer, source, beside.notes)
    trained_tokenizer = _as_trained(run, path)
    same = source is not None and _same_tokens(run, source, trained_tokenizer, beside.notes)

    _add_ids(beside, run, source if same else None, path, trained_tokenizer)
    _add_context(beside, run, source, context)
    if path is not None and isinstance(trained_tokenizer, FileTokenizer):
        _add_tokenizer(beside, path, trained_tokenizer, source)
    _add_template(beside, run, settings, path)
    return beside


def _add_ids(beside: Beside, run: Run, source: _Source | None, path: Path | None, tokenizer: Any) -> None:
    """Adds the ids of special tokens, and how text is generated: those of the source, if it has the run's tokens."""
    generation = {} if source is None else source.generation
    ids = {} if source is None else ids_of(source.config, generation)
    if "eos_token_id" not in ids and tokenizer is not None:
        config = {} if path is None else read_if_there(path.with_name(TOKENIZER_CONFIG))
        ids = ids_of_tokenizer({} if path is None else vocabulary_of(path), config, tokenizer.stop_ids) | ids
    beside.config |= ids
    if "eos_token_id" not in ids:
        beside.notes.append(f"neither eos_token_id nor {GENERATION} is written: nothing says which token ends a text")
        return
    named = as_list(generation.get("eos_token_id"))
    ends = named or as_list(ids["eos_token_id"])
    document_ends = [] if tokenizer is None else as_list(tokenizer.eos_id)
    if source is not None and not _templates(run) and not set(document_ends) <= set(ends):
        beside.notes.append(
            f"eos_token_id of {GENERATION} is {', '.join(map(str, ends))} of {source.was}, and {document_ends[0]}, "
            "which ends the run's documents"
        )
        ends = [*ends, *document_ends]
    if not named:
        ends = list(dict.fromkeys([*ends, *([] if tokenizer is None else tokenizer.stop_ids)]))
        generation = ids | generation
    if ends != named:
        generation = generation | {"eos_token_id": ends if len(ends) > 1 else ends[0]}
    unchanged = source is not None and generation == source.generation
    beside.files[GENERATION] = source.folder / GENERATION if source is not None and unchanged else text_of(generation)


def _add_context(beside: Beside, run: Run, source: _Source | None, asked: int | None) -> None:
    """Adds the context, which is never shorter than that of the source unless the user asks for it."""
    c = run.model
    # No field records the context that linear and ntk scale from.
    scaled = int(c.rope_factor * c.rope_original_length) if c.rope_scaling in ("yarn", "llama3") else 0
    if source is None:
        context, line = context_of(asked, run.longest, scaled, None, None)
    else:
        theirs = source_context(source.config, source.folder / "config.json")
        context, line = context_of(asked, run.longest, scaled, theirs, source.was)
        beside.architecture = next((n for n in source.config.get("architectures") or [] if n in FAMILIES), None)
    beside.config["max_position_embeddings"] = context
    beside.notes += [line] if line else []


def _add_tokenizer(beside: Beside, path: Path, tokenizer: FileTokenizer, source: _Source | None) -> None:
    """Adds the tokenizer's files. If it stands alone in its folder, those beside the same tokenizer in the source are taken."""
    files = tokenizer_files(path)
    if len(files) == 1 and source is not None and _digest(source.folder / TOKENIZER) == tokenizer.fingerprint:
        files = tokenizer_files(source.folder / TOKENIZER)
    end, context = tokenizer.token_of(tokenizer.eos_id), beside.config["max_position_embeddings"]
    text, line = tokenizer_config(files.get(TOKENIZER_CONFIG), context, end)
    beside.files |= files | ({} if text is None else {TOKENIZER_CONFIG: text})
    beside.notes += [*([line] if line else []), *_told_bos(files[TOKENIZER], tokenizer)]


def _told_bos(written_file: Path, tokenizer: FileTokenizer) -> list[str]:
    """Returns a line if the exported tokenizer, with the files beside it, begins a text differently from the run's documents:
    generation follows those files."""
    ours = tokenizer.token_of(tokenizer.bos_id)
    try:
        by_files = FileTokenizer(written_file, SpecialTokens(eos=tokenizer.token_of(tokenizer.eos_id)))
        others = by_files.token_of(by_files.bos_id)
    except ValueError:
        others = "a token that it does not have"
    if others == ours:
        return []
    ours, others = (token or "no token" for token in (ours, others))
    return [f"a text begins with {others} by the tokenizer's files, and the run's documents with {ours} (data.bos)"]


# -- the folder that the weights came from --------------------------------------------------------------------------------


def _source_of(run: Run, notes: list[str]) -> _Source | None:
    """Returns the published folder that a run, or the run that it continues, started from; None without one, or if it has
    changed since."""
    folder, was, reason = _origin(run, notes)
    left = f"what its config.json and {GENERATION} say of tokens, generation and context is not written"
    if folder is None or was is None:
        notes += [f"{reason}: {left}"] if reason else []
        return None
    try:
        _, theirs = read_config(folder)
        config, generation = read_json(folder / "config.json"), read_if_there(folder / GENERATION)
    except ValueError as error:
        notes.append(f"{error}: {left}")
        return None
    # A curriculum may change how positions turn.
    rope = {f.name: getattr(run.model, f.name) for f in fields(DecoderConfig) if f.name.startswith("rope_")}
    if changed := differences(run.model, replace(theirs, **rope)):
        value = written(flat(theirs).get(changed[0])) if changed[0] != "layers" else ", ".join(theirs.kinds())
        notes.append(
            f"{folder} has changed since the run started from it: its model has {changed[0]} = {value}: {left}"
        )
        return None
    return _Source(folder, was, config, generation)


def _origin(run: Run, notes: list[str]) -> tuple[Path | None, Path | None, str]:
    """Returns (the folder with the config.json that a run started from, or what is kept of it; the folder that it was; the
    reason if both are missing)."""
    where, seen, of = run.recipe.get("model.init_from"), {str(run.folder)}, _run_dir(run)
    while where is not None and str(where) not in seen:
        seen.add(str(where))
        folder = source_path("model.init_from", where)
        kept, changed = files_kept(where, of)
        if kept is not None:
            what = f"{', '.join(changed)} in {folder} changed since the run began" if changed else _told_gone(where)
            notes.append(f"{what}: what was there is taken from {kept}")
            return kept, folder, ""
        if published_in(where) is not None:
            return folder, folder, ""
        try:
            before = Run(where, key="model.init_from")
            where = before.recipe.get("model.init_from")
            of = _run_dir(before)
            before.close()
        except (CheckpointError, ValueError, OSError):
            return None, None, _told_gone(where)
    return None, None, ""


def _told_gone(where: str) -> str:
    gone = "is gone" if is_url(where) or not Path(where).expanduser().exists() else "is no model any more"
    return f"{where}, which the run started from, {gone}"


def _run_dir(run: Run) -> Path:
    """Returns the folder of a run, which may have been named by the checkpoints in it."""
    folder = Path(str(run.folder))
    return folder.parent if folder.name == "checkpoints" and not (folder / "checkpoints").is_dir() else folder


def _same_tokens(run: Run, source: _Source, tokenizer: Any, notes: list[str]) -> bool:
    """Returns whether the ids of the source are of the tokenizer that the run was trained with."""
    path = source.folder / TOKENIZER
    why = "the run was trained with another tokenizer than is there"
    if _is_bytes(run):
        same = False
    elif path.exists():
        same = _digest(path) == run.data["tokenizer"]
    else:
        ends = [i for one in (source.config, source.generation) for i in as_list(one.get("eos_token_id"))]
        same = tokenizer is None or tokenizer.eos_id in ends
        why = "it has no tokenizer, and the end of the run's documents is not among its eos_token_id"
    if not same:
        notes.append(f"the ids of special tokens and {GENERATION} of {source.was} are not written: {why}")
    return same


# -- the tokenizer --------------------------------------------------------------------------------------------------------


def _is_bytes(run: Run) -> bool:
    return run.data["tokenizer"] == ByteTokenizer.fingerprint


def _as_trained(run: Run, path: Path | None) -> ByteTokenizer | FileTokenizer | None:
    """Returns the tokenizer of a file, or bytes, with the BOS and EOS that the run's documents have; None if neither exists."""
    recorded_ends = "eos" in run.data
    if _is_bytes(run):
        return ByteTokenizer(SpecialTokens(eos=None) if recorded_ends and run.data["eos"] is None else SpecialTokens())
    if path is None:
        return None
    if recorded_ends:
        return FileTokenizer(path, SpecialTokens(run.data["bos"], run.data["eos"]))
    # Before they were recorded, a document had no BOS, and its EOS came from the vocabulary, whatever the files said.
    return FileTokenizer.of(path.read_bytes(), f"data.tokenizer = {str(path)!r}", SpecialTokens(bos=None))


def _tokenizer_of(
    run: Run, settings: Mapping[str, Any], asked: str | None, source: _Source | None, notes: list[str]
) -> Path | None:
    """Returns the tokenizer.json that a run was trained with. Raises ValueError if `asked` is not that."""
    if asked is not None:
        path = tokenizer_file(asked)
        if (digest := _digest(path)) != run.data["tokenizer"]:
            if digest is None:
                why = "cannot be read" if path.exists() else "there is no such file"
                raise ValueError(
                    f"data.tokenizer = {asked!r}: {why}; give the tokenizer.json that the run was trained with"
                )
            raise ValueError(
                f"data.tokenizer = {asked!r} is not the file that the run was trained with; give that one, or leave it out"
            )
        return path
    if _is_bytes(run):
        notes.append(
            "no tokenizer is written: data.tokenizer=bytes, ids 0 to 255 and 256 for the end, has no tokenizer file"
        )
        return None
    places = list(_places(settings, source, _run_dir(run)))
    for path in places:
        if _digest(path) == run.data["tokenizer"]:
            return path
    why = "the checkpoint does not say where it was"
    if places:
        why = f"{places[0]} {'has changed since the run' if places[0].exists() else 'is gone'}"
    notes.append(
        f"no tokenizer is written: {why}; give data.tokenizer=FILE, the tokenizer.json that the run was trained with"
    )
    return None


def _places(settings: Mapping[str, Any], source: _Source | None, run_dir: Path) -> Iterator[Path]:
    """Yields where the tokenizer of a run may be."""
    name = str(settings.get("data.tokenizer", "bytes"))
    if name.startswith("bpe:"):
        cache = Path(settings.get("data.cache_dir") or default_cache_dir()).expanduser()
        yield from sorted(cache.glob(f"tokenizer-*/{TOKENIZER}"))
    elif name not in ("bytes", OWN):
        path = source_path("data.tokenizer", name)
        path = path / TOKENIZER if path.is_dir() or path == getattr(source, "was", None) else path
        if source is not None and source.folder != source.was == path.parent:
            yield source.folder / TOKENIZER  # beside which are the files from when the run began
        yield path
    if name == OWN or name.startswith("bpe:"):
        yield from (folder / TOKENIZER for folder in _folders(settings))
    if source is not None:
        yield source.folder / TOKENIZER
    if (kept := run_dir / KEPT / TOKENIZER).exists():
        yield kept


def _folders(settings: Mapping[str, Any]) -> Iterator[Path]:
    """Yields the data of a run that may be folders: of the recipe, then of each stage, those of a mixture too."""
    stages = (
        f"curriculum[{i}]"
        for i in itertools.takewhile(lambda i: f"curriculum[{i}].until" in settings, itertools.count())
    )
    for section in ("data", *stages):
        parts = (part.get("source") for part in settings.get(f"{section}.mixture") or [])
        named = (one for one in (settings.get(f"{section}.source"), *parts) if isinstance(one, str))
        yield from (Path(one).expanduser() for one in named if not is_url(one))


# -- the template of conversations ----------------------------------------------------------------------------------------


def _templates(run: Run) -> set[str]:
    """Returns the digests of the templates that a run was trained with."""
    return {one["template"] for one in run.data.get("conversations") or [] if one and "template" in one}


def _add_template(beside: Beside, run: Run, settings: Mapping[str, Any], path: Path | None) -> None:
    """Adds the template that a run was trained with, where the files of the tokenizer have another or none."""
    digests, asked = _templates(run), settings.get("data.chat_template")
    if not digests:
        return
    try:
        tokenizer_templates = {} if path is None else _chats(None, str(path), settings)
    except ValueError:
        tokenizer_templates = {}
    if digests & tokenizer_templates.keys():
        return
    try:
        tokenizer = str(settings.get("data.tokenizer", "bytes") if path is None else path)
        candidates = _of_dataset(settings) or _chats(asked, tokenizer, settings)
        why = "it has changed since the run, or is a source's own"
    except (ValueError, OSError) as error:
        candidates, why = {}, str(error)
    template = next((templates["default"] for digest, templates in candidates.items() if digest in digests), None)
    if template is None:
        beside.notes.append(
            f"the chat template that the run was trained with is not written: {why}; copy it to {TEMPLATE}"
        )
        return
    beside.files[TEMPLATE] = template
    beside.notes.append(f"{TEMPLATE} is the one that the run was trained with{f', {asked}' if asked else ''}")


def _chats(asked: str | None, tokenizer: str, settings: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns digest -> templates, of a name or file, or of the folder of a tokenizer. Raises ValueError if there is none."""
    templates = templates_of(asked, tokenizer)
    arguments = dict(settings.get("data.chat_template_kwargs") or {})
    chats = Chats("messages", "", "", "", templates=templates, tokens=tokens_of(tokenizer), arguments=arguments)
    return {chats.template_digest: templates}


def _of_dataset(settings: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns digest -> templates of the datasets of conversations from launch.tokenize; {} if the data are no dataset."""
    made = [folder for folder in _folders(settings) if (folder / MANIFEST).exists()]
    chats = [open_dataset(folder, OWN).chats for folder in made]
    return {one.template_digest: one.templates for one in chats if one is not None}
