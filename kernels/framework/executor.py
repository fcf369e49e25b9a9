"""Operations as module classes, and an executor that runs them with its own configuration chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels.framework.config import PersistentCache
from kernels.framework.select import ConfigSelectorChain, use_chain


class Module:
    """An operation as an object: calling it calls its function, with keyword defaults set at construction."""

    function: Callable

    def __init__(self, **defaults: Any) -> None:
        self.defaults = defaults

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self).function(*args, **{**self.defaults, **kwargs})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.defaults.items())})"


def module_class(name: str, function: Callable) -> type[Module]:
    """Returns the module class of a function, such as `FlashAttention` for `flash_attention`."""
    about = {"__doc__": function.__doc__, "__module__": function.__module__}
    return type(name, (Module,), {"function": staticmethod(function), **about})


class Executor:
    """Runs operations with the configurations that its chain selects.

    >>> executor = Executor(ConfigSelectorChain(autotune=False))
    >>> executor(lambda x: x + 1, 1)
    2
    """

    def __init__(self, chain: ConfigSelectorChain) -> None:
        if not isinstance(chain, ConfigSelectorChain):
            raise ValueError(f"argument 'chain' must be a ConfigSelectorChain, got {type(chain).__name__}")
        self.chain = chain

    def __call__(self, operation: Callable, *args: Any, **kwargs: Any) -> Any:
        """Returns `operation(*args, **kwargs)`; `cfg=` overrides the chain for this call and is not stored."""
        with use_chain(self.chain):
            return operation(*args, **kwargs)


def create_default_executor() -> Executor:
    """Returns an executor that stores what it tunes for later processes."""
    return Executor(ConfigSelectorChain(persistent=PersistentCache()))
