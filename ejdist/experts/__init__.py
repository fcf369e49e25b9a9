"""Mixtures of experts: the router, its losses and statistics, and the layer."""

from ejdist.experts.layer import MoE, local, moe
from ejdist.experts.losses import balance_loss, sequence_balance_loss, update_bias, z_loss
from ejdist.experts.metrics import REDUCTIONS, Stats, Traffic, merge, summary
from ejdist.experts.router import SCORES, Route, Routing, route

__all__ = [
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
