"""A process whose plugins are gone again after the test."""

import contextlib
import sys

from ejdist import registered


@contextlib.contextmanager
def plugins_of_a_test():
    """Forgets, after the body, what it registered and the modules that it imported, and finds others on the path again."""
    path, modules = list(sys.path), set(sys.modules)
    assert not registered.loaded(), "a test before this one has left plugins behind"
    try:
        yield
    finally:
        registered.forget()
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if name.partition(".")[0] in ("examples", "mine", "other"):
                del sys.modules[name]
