"""The framework of operations: executor, configuration chain and its parts."""

from kernels._core.config import (
    BwdParams,
    ConfigCache,
    ConfigSelectorChain,
    FwdParams,
    KernelConfig,
    PersistentCache,
    config_overlay,
)
from kernels._core.executor import Executor, create_default_executor, module_class

__all__ = [
    "BwdParams",
    "ConfigCache",
    "ConfigSelectorChain",
    "Executor",
    "FwdParams",
    "KernelConfig",
    "PersistentCache",
    "config_overlay",
    "create_default_executor",
    "module_class",
]
