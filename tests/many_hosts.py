"""Hosts that are threads of one process, with a store in memory in the place of that of JAX's coordinator."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax

import ejdist.cluster.hosts as hosts_module
from ejdist.cluster import Hosts

HERE = threading.local()


class Store:
    """What is used of the client of JAX's coordinator."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or key not in self.values, f"{key} is set twice, which the coordinator refuses"
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
            return self.values[key]

    def key_value_dir_get(self, prefix):
        with self.changed:
            return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]


def hosts_of_threads(monkeypatch):
    """Returns a function that runs `act(hosts)` on so many hosts at once, and returns what each returned or raised."""
    monkeypatch.setattr(hosts_module, "_SLICE", 0.02)
    monkeypatch.setattr(jax, "process_index", lambda: HERE.index)
    monkeypatch.setattr(hosts_module, "_index", lambda: HERE.index)

    def run(count, act, limit=5.0, come=None):
        store, turns = Store(), [iter(range(100)) for _ in range(count)]
        monkeypatch.setattr(jax, "process_count", lambda: count)
        monkeypatch.setattr(hosts_module, "_store", lambda: store)
        # Each thread counts for itself, as each process does.
        monkeypatch.setattr(
            hosts_module, "_numbers", type("", (), {"__next__": lambda self: next(turns[HERE.index])})()
        )

        def one(index):
            HERE.index = index
            try:
                return act(Hosts(limit))
            except Exception as error:
                return error

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, range(count) if come is None else come))

    return run
