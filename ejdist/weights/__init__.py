"""Weights in and out: safetensors of Hugging Face straight into the shards of a mesh, and back; see the README beside."""
