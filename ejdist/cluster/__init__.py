"""What the hosts of a run say to each other beside the program: that they are there, and that they mean the same."""

from ejdist.cluster.hosts import HostLost, Hosts, HostsDiffer

__all__ = ["HostLost", "Hosts", "HostsDiffer"]
