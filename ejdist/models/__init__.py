"""Models whose parameters are declared once, and which know no mesh axis and no backend."""

from ejdist.models.config import DecoderConfig
from ejdist.models.decoder import declare, forward, init, loss, num_parameters
from ejdist.models.ops import Ops, local_ops
from ejdist.models.parameters import Param
from ejdist.models.remat import REMAT_POLICIES

__all__ = [
    "REMAT_POLICIES",
    "DecoderConfig",
    "Ops",
    "Param",
    "declare",
    "forward",
    "init",
    "local_ops",
    "loss",
    "num_parameters",
]
