"""Texts of a model: `Engine` generates them, on the mesh and with the parameters that train it."""

from ejdist.generation.engine import Engine
from ejdist.generation.requests import Result, Token
from ejdist.generation.sampling import Sampling

__all__ = ["Engine", "Result", "Sampling", "Token"]
