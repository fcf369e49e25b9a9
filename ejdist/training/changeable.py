"""Which keys may have other values from a step of a run on (`run.allow_change`)."""

from __future__ import annotations

import difflib
from typing import Any

from ejdist.sections import keys_of
from ejdist.training.curriculum import ROPE

# Keys that decide which arrays the state has, or what its numbers mean.
_FIXED = {
    "data.tokenizer": "its ids would be other text for the model",
    "optimizer.name": "the moments of one optimizer are nothing to another",
    "loss": "what a loss keeps beside the model is part of the state",
}


def is_changeable(key: str) -> bool:
    """Returns whether `run.allow_change` can name a key that affects the losses."""
    ours = not key.startswith(("model.", "lora.", "run.", "curriculum")) or key.removeprefix("model.") in ROPE
    return (ours and key not in _FIXED) or key == "run.seed"


def check_allowed(sections: Any) -> None:
    """Raises ValueError for a key of `run.allow_change` that cannot change, with the reason."""
    loss_keys = {key.name for key in keys_of(sections) if key.affects_losses}
    for key in sections.run.allow_change:
        if key in loss_keys and is_changeable(key):
            continue
        reasons = {
            "run.steps": "set run.extend=true for that",
            "curriculum": "steps that are yet to come may change without, and those that were made are named by their key",
        } | _FIXED
        reason = reasons.get(key)
        if reason is None and key.startswith("lora."):
            reason = "a run keeps the adapters that it started with"
        if reason is None and key.startswith("model."):
            reason = "of the model only its rope keys can change"
        if reason is None and not any(key == k.name for k in keys_of(sections)):
            near = difflib.get_close_matches(key, loss_keys, n=1)
            reason = f"there is no such key{f'; did you mean {near[0]!r}?' if near else ''}"
        reason = reason or "it does not affect the losses, and may change without"
        raise ValueError(f"run.allow_change names {key!r}: {reason}")
