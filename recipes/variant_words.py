"""What other trainers call the variants of our groups, `model=llama3_8b`; and the key that a section may mean."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence

# Variants of groups by other names, and what to do about a name that no variant has.
_VARIANTS = {
    "cluster": {"auto": "slurm gke kubernetes k8s tpu pod openmpi mpi torchrun", "local": "single none"},
    "data": {
        "files": "json jsonl text parquet custom local folder",
        "dataset": "tokens tokenized bin arrow grain preprocessed",
        "stdlib": "synthetic dummy mock random test",
    },
    "mesh": {
        "sequence": "cp sp ring ulysses context sequence_parallel",
        "fsdp_sequence": "fsdp_cp fsdp_sp hybrid",
        "experts": "ep moe expert",
        "single": "none one cpu",
    },
    "model": {
        "hf": "huggingface hugging_face transformers pretrained published auto from_pretrained",
        "nano": "debugmodel debug tiny small test toy",
        "moe_nano": "moe tiny_moe moe_debug",
        "hybrid_nano": "hybrid tiny_hybrid mamba",
        "sparse_nano": "sparse nsa native_sparse tiny_sparse",
    },
    "optimizer": {
        "adamw": "adam cosine warmup_cosine adamw_torch fused_adam",
        "muon": "moonlight muonclip dist_muon",
        "wsd": "warmup_stable_decay trapezoidal",
    },
    "recipe": {
        "long_context": "pretrain pretraining default train base",
        "moe": "mixture moe_pretrain",
        "hybrid_long_context": "hybrid linear_attention mamba",
    },
}
_ELSE = {
    "data": "files are data=files data.source='corpus/**/*.jsonl', and a dataset of Hugging Face is data.source=hf:NAME",
    "model": "a downloaded model is model=hf model.init_from=FOLDER",
    "recipe": "a recipe of your own is --config-dir DIR recipe=NAME, for DIR/recipe/NAME.yaml",
}


def variant(group: str, given: str, known: Collection[str]) -> str | None:
    """Returns the sentence that leads from another name of a variant to ours, None for a group that says nothing of others."""
    name = re.sub(r"[-.\s]+", "_", given.strip().lower().rpartition("/")[2])
    best = next((ours for ours, theirs in _VARIANTS.get(group, {}).items() if name in theirs.split()), None)
    if group == "model" and best is None:
        size = re.fullmatch(r"(meta_)?llama_?3(_?[0-3])?_(1|8|70)b(_\w+)?", name)
        parts = [
            one for one in known if re.search(rf"(^|_){re.escape(one)}(_|$)", name) and not re.fullmatch(r"\d+b", one)
        ]
        best = f"{size[3]}b" if size else max(parts, key=len, default=None)
    if best in known:
        return f"did you mean {group}={best}?"
    return _ELSE.get(group)


def within(name: str, keys: Sequence[str]) -> str:
    """Returns the nearest key of a section within a section, model.gla or optimizer.muon, that a wrong key names."""
    section, _, last = name.rpartition(".")
    lasts = [k.rpartition(".")[2] for k in keys if "." in section and k.rpartition(".")[0] == section]
    near = difflib.get_close_matches(last, lasts, n=1, cutoff=0.5)
    return f"did you mean {f'{section}.{near[0]}'!r}?" if near else ""
