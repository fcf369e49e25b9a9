"""The framework of operations: executor, configuration chain and its parts."""

from kernels.framework.config import BwdParams, ConfigCache, FwdParams, KernelConfig, PersistentCache
from kernels.framework.executor import Executor, create_default_executor, module_class
from kernels.framework.select import ConfigSelectorChain, config_overlay

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
