"""What stands beside the tensors in a folder that others load: ids of special tokens, the context, how text is generated, and
the tokenizer's files. It is as in the folder that the model comes from, where there is one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ejdist.weights.files import WeightsError, read_json

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # keys of config.json and generation_config.json
GENERATION = "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", TEMPLATE, "chat_template.json"),
)
_TEMPLATES = "additional_chat_templates"


def tokenizer_files(tokenizer: Path) -> dict[str, Path]:
    """Returns name -> file of a tokenizer.json, whatever it is called, and of what stands beside it."""
    folder = tokenizer.parent
    files = {name: folder / name for name in _FILES if (folder / name).is_file()} | {TOKENIZER: tokenizer}
    more = sorted((folder / _TEMPLATES).glob("*.jinja"))
    return files | {f"{_TEMPLATES}/{path.name}": path for path in more}


def ids_of(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ids of special tokens of a model, as its config.json has them, or else its generation_config.json."""
    ids = {name: config.get(name) if config.get(name) is not None else generation.get(name) for name in IDS}
    return {name: value for name, value in ids.items() if value is not None}


def ids_of_tokenizer(vocabulary: Mapping[str, int], config: Mapping[str, Any], ends: Sequence[int]) -> dict[str, Any]:
    """Returns the ids of special tokens that the files of a tokenizer name.

    Args:
      vocabulary: token -> id.
      config: its tokenizer_config.json.
      ends: the ids that end what is generated, that of a document in training first. So does the tokenizer's own end.
    """
    named = {name: _token(config.get(name.removesuffix("_id"))) for name in IDS}
    ids: dict[str, Any] = {name: vocabulary[token] for name, token in named.items() if token in vocabulary}
    ends = list(dict.fromkeys([*ends, *as_list(ids.get("eos_token_id"))]))
    return ids | ({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})


def vocabulary_of(tokenizer: Path) -> dict[str, int]:
    """Returns token -> id of a tokenizer.json. Raises WeightsError if it cannot be read."""
    content = read_json(tokenizer)
    model = content.get("model")
    tokens = model.get("vocab") if isinstance(model, dict) else None
    added = [t for t in content.get("added_tokens") or [] if isinstance(t, dict)]
    ids: dict[str, int] = dict(tokens) if isinstance(tokens, dict) else {}
    return ids | {str(t.get("content")): int(t.get("id", -1)) for t in added}


def _token(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def as_list(ids: Any) -> list[int]:
    """Returns the ids of a key, which has none, one or several."""
    return [] if ids is None else list(ids) if isinstance(ids, list) else [ids]


def read_if_there(path: Path) -> dict[str, Any]:
    """Returns what a JSON file holds; {} where there is none. Raises WeightsError if it cannot be read."""
    return read_json(path) if path.exists() else {}


def tokenizer_config(file: Path | None, context: int, eos: str | None) -> tuple[str | None, str | None]:
    """Returns (the text to write as tokenizer_config.json, a line that says why); (None, None) if the file is good as it is.

    Without one, transformers would take the tokenizer for one of the model's family, whatever tokenizer.json says.
    """
    if file is None:
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"} | (
            {} if eos is None else {"eos_token": eos}
        )
        return text_of(config | {"model_max_length": context}), None
    config = read_json(file)
    most = config.get("model_max_length")
    if not isinstance(most, int) or most >= context:
        return None, None
    line = f"model_max_length of {TOKENIZER_CONFIG} is raised from {most} to {context}, or the text would be cut there"
    return text_of(config | {"model_max_length": context}), line


def text_of(content: Mapping[str, Any]) -> str:
    """Returns an object as the text of a JSON file."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def context_of(
    asked: int | None, trained: int, scaled: int, source: int | None, where: Path | None
) -> tuple[int, str | None]:
    """Returns (max_position_embeddings, a line about it where it differs from that of the source).

    Args:
      asked: what the user wants; None for the longest of the others.
      trained: tokens of the longest rows of the run.
      scaled: of the positions that RoPE's scaling reaches; 0 if it does not say.
      source, where: of the config.json of the folder that the model comes from.
    """
    ours = max(trained, scaled)
    context = asked or max(ours, source or 0)
    why = f"the run trained rows of {trained}" if trained >= scaled else f"model.rope_scaling reaches {scaled}"
    if source is not None and context < source:
        return context, f"max_position_embeddings is {context}, as asked: shorter than the {source} of {where}"
    if context < ours:
        return context, f"max_position_embeddings is {context}, as asked, and {why}"
    if source is not None and context > source:
        reason = "as asked" if asked else why
        return context, f"max_position_embeddings is raised from the {source} of {where} to {context}: {reason}"
    return context, None


def source_context(config: Mapping[str, Any], path: Path) -> int | None:
    """Returns the context of a config.json. Raises WeightsError if it is not a positive integer."""
    length = config.get("max_position_embeddings")
    if length is not None and (type(length) is not int or length < 1):
        raise WeightsError(
            f"{path} has max_position_embeddings = {length!r}, which is not a positive integer; copy it again"
        )
    return length
