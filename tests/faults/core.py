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
    Fault(
        "options: NaN is a number",
        "kernels/_core/options.py",
        "not isinstance(value, bool) and value == value",
        "not isinstance(value, bool)",
        "tests/test_illegal_calls.py -k of_an_operation",
    ),
    Fault(
        "options: what has the wrong type goes through",
        "kernels/_core/options.py",
        "        check_all(given)\n        return prepared",
        "        return prepared",
        "tests/test_illegal_calls.py -k 'public and (state_space or mean_pooling or blocksparse or flash)'",
    ),
    Fault(
        "options: a function speaks of another",
        "kernels/_core/options.py",
        'raise ValueError(f"{function.__name__}: {said}") from error',
        "raise",
        "tests/test_illegal_calls.py -k 'public and (cross_entropy or blocksparse)'",
    ),
    Fault(
        "a required array may be None",
        "kernels/_core/binding.py",
        "if value is None and (p.default",
        "if value is None and False and (p.default",
        "tests/test_illegal_calls.py -k 'of_an_operation and (rms_norm or recurrent)'",
    ),
    Fault(
        "target: a machine without a GPU speaks in another's words",
        "kernels/_core/triton.py",
        "except (RuntimeError, ValueError, AttributeError)",
        "except RuntimeError",
        "tests/test_toolchains.py -k to_be_told",
    ),
    Fault(
        "target: the program for one GPU is taken for another's",
        "kernels/_core/target.py",
        "_asked = jax.make_user_context(default_value=None)",
        "class _Asked:\n    value = None\n"
        "    def __call__(self, cc):\n        self.value = cc\n        return contextlib.nullcontext()\n_asked = _Asked()",
        "tests/test_toolchains.py -k its_own_target",
    ),
    Fault(
        "a sum over the batch is batched as if it had one",
        "kernels/_core/execute.py",
        "if any(d is None or not (",
        "if any(d is not None and not (",
        "tests/test_core.py -k keeps",
    ),
    Fault(
        "what a forward keeps has other names than its contract says",
        "kernels/_core/execute.py",
        "if set(kept) != set(result[1]):",
        "if False:",
        "tests/test_core.py -k keeps",
    ),
)
