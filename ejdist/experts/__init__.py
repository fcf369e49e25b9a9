"""Mixtures of experts: the router, its losses and statistics, and the layer."""

from ejdist.experts.choice import Choice, choose
from ejdist.experts.dispatch import exchange
from ejdist.experts.layer import MoE, moe
from ejdist.experts.local import local
from ejdist.experts.losses import balance_loss, sequence_balance_loss, update_bias, z_loss
from ejdist.experts.metrics import REDUCTIONS, Stats, Traffic, merge, summary
from ejdist.experts.router import SCORES, Route, Routing, route
from ejdist.experts.schemes import SCHEMES

__all__ = [
    "SCHEMES",
    "Choice",
    "choose",
    "exchange",
    "REDUCTIONS",
    "SCORES",
    "MoE",
    "Route",
    "Routing",
    "Stats",
    "Traffic",
    "balance_loss",
    "local",
    "merge",
    "moe",
    "route",
    "sequence_balance_loss",
    "summary",
    "update_bias",
    "z_loss",
]

# What `ejdist` has of these by itself.
FUNCTIONS = {"moe": moe, "route": route}
MODULES = {"MoE": MoE, "Route": Route}
