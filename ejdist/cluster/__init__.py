"""Communication between the hosts of a run outside the compiled program: liveness checks, comparisons and shutdown."""

from ejdist.cluster.hosts import HostLost, Hosts, HostsDiffer

__all__ = ["HostLost", "Hosts", "HostsDiffer"]
