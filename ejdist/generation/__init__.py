"""Text generation: `Engine` generates on the mesh and with the parameters that training uses."""

from ejdist.generation.engine import Engine
from ejdist.generation.requests import Result, Token
from ejdist.generation.sampling import Sampling

__all__ = ["Engine", "Result", "Sampling", "Token"]
