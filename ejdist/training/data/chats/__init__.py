"""Conversations: rows of messages, prompts with completions, or ids with labels become tokens with a mask beside them."""
