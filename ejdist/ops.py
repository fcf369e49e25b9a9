"""The framework of operations: executor, configuration chain and its parts."""

from kernels._core.config import BwdParams, ConfigCache, FwdParams, KernelConfig, PersistentCache
from kernels._core.executor import Executor, create_default_executor, module_class
from kernels._core.select import ConfigSelectorChain, config_overlay

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
