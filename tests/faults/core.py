"""Faults of the framework (kernels/_core)."""

from faults import Fault

FAULTS = (
    Fault(
        "a configuration tuned for another device",
        "kernels/_core/select.py",
        '            "device": self.device_kind,\n',
        "",
        "tests/test_core.py -k one_kind_of_device",
    ),
    Fault(
        "visible pairs miss the interval's end",
        "kernels/_core/pairs.py",
        'place(ids, high), side="right"',
        'place(ids, high), side="left"',
        "tests/test_work.py",
    ),
    Fault(
        "a draft token sees its siblings",
        "kernels/_core/trees.py",
        "reach = above | jnp.eye(T, dtype=bool)",
        "reach = above | (parents[:, :, None] == parents[:, None])",
        "tests/test_trees.py",
    ),
)
