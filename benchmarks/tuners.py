"""Peers that tune themselves with Triton's tuner: their configurations are compiled side by side before the tuner times them.

The tuner compiles a configuration when it comes to it. fla has dozens for each of a dozen kernels, which one after another take
longer than a benchmark may."""

from __future__ import annotations

import concurrent.futures
import functools
import os
from typing import Any


def _key(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns by what the tuner remembers its choice."""
    given = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    known = {name: x for name, x in given.items() if name in tuner.arg_names}
    dtypes = (str(x.dtype) for x in known.values() if hasattr(x, "dtype"))
    return (*(known[name] for name in tuner.keys if name in known), *dtypes)


@functools.cache
def compile_side_by_side(workers: int | None = None) -> None:
    """From now on Triton's tuner compiles all configurations of a kernel on `workers` threads (of this host's cores) before it
    times any. What cannot be compiled is left to the tuner, which leaves it out.

    The choice stays the tuner's. A Triton without asynchronous compilation compiles one after another, as before.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    run = Autotuner.run

    @functools.wraps(run)
    def compiled_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.configs) > 1 and active_mode.get() is None and _key(self, args, kwargs) not in self.cache:
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            count = workers or os.cpu_count()
            with concurrent.futures.ThreadPoolExecutor(count) as pool, AsyncCompileMode(pool, ignore_errors=True):
                for config in self.prune_configs(kwargs):
                    try:
                        self.fn.run(*args, **{**kwargs, **config.all_kwargs(), "warmup": True})
                    except Exception as error:  # the tuner meets it again, and says so or leaves the configuration out
                        print(f"{self.base_fn.__name__}: {config} is not compiled ahead: {error}", flush=True)
        return run(self, *args, **kwargs)

    Autotuner.run = compiled_first
