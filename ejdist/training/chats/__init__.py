"""Conversations: rows of messages, prompts with completions, or ids with labels become tokens with a mask beside them."""

from pathlib import Path

EXAMPLES = Path(__file__).parent / "examples.jsonl"  # a few that are always there
