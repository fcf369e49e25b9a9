"""The optimizer: AdamW, Muon, or one of a plugin, with a schedule, through optax, and where and how its moments are kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ejdist.models.parameters import Param
from ejdist.registered import OPTIMIZER, Entry, entry_of, names_of, sizes_of
from ejdist.sections import operational
from ejdist.training.muon import Matrices, MuonSection, all_matrices, matrices_of, scale_by_muon
from ejdist.training.qk_clip import check_clip, clipped
from ejdist.training.rounding import random_bits, rounded, seed_of

ADAMW, MUON = "adamw", "muon"
NAMES = (ADAMW, MUON)
SCHEDULES = ("warmup_cosine", "wsd", "constant")
DTYPES, PLACES = ("float32", "bfloat16"), ("none", "host")


@dataclass
class OptimizerSection:
    """The `optimizer` section of a recipe."""

    name: str = ADAMW  # adamw, muon, or the name of an optimizer that a plugin registers
    learning_rate: float = 3e-4  # the largest rate, after the warmup
    schedule: str = "warmup_cosine"  # of the rate: warmup_cosine, wsd (warmup, stable, decay), constant (after warmup)
    warmup_steps: int = 100  # steps in which the rate rises; at most all but one of the run's
    decay_fraction: float = 0.1  # fraction of all steps, at the end, in which wsd decays
    final_ratio: float = 0.1  # the rate of the last step over the peak
    b1: float = 0.9  # decay of Adam's first moment
    b2: float = 0.95  # decay of Adam's second moment
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.1  # pulls weights to zero, times the rate; not norms and biases
    clip_norm: float = 1.0  # largest norm of the whole gradient, which is scaled down to it; 0 for none
    moments: str = "float32"  # dtype of both moments; bfloat16 is rounded stochastically
    # host: the moments of matrices stay in the host's memory, and the update streams them layer by layer.
    offload: str = operational("none")
    accumulate: str = "float32"  # dtype of the sum of gradients over microbatches; bfloat16 is rounded stochastically
    muon: MuonSection = field(default_factory=MuonSection)
    # After a step of Muon, queries and keys of heads with logits past this become smaller (QK-clip); null for none.
    qk_clip: float | None = None

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy."""
        for name, value in fixed(self).items():
            if getattr(self, name) != value:
                why, remedy = "keeps its own state", ""
                if name == "offload":
                    remedy = "; its module may register it with elementwise=True"
                if self.name == MUON:
                    why, remedy = "needs whole stacks of matrices on the devices", ""
                raise ValueError(
                    f"optimizer.{name} = {getattr(self, name)!r} does not go with optimizer.name = {self.name!r}, which {why}; "
                    f"set it to {value}{remedy}"
                )
        if self.schedule not in SCHEDULES:
            raise ValueError(f"optimizer.schedule = {self.schedule!r} is unknown; use one of {', '.join(SCHEDULES)}")
        for name, known in (("moments", DTYPES), ("offload", PLACES), ("accumulate", DTYPES)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"optimizer.{name} = {value!r} is unknown; use {' or '.join(known)}")
        if not 0 <= self.decay_fraction <= 1:
            raise ValueError(f"optimizer.decay_fraction must be in [0, 1], got {self.decay_fraction}")
        if not 0 <= self.final_ratio <= 1:
            raise ValueError(f"optimizer.final_ratio must be in [0, 1], got {self.final_ratio}")
        if not 0 < _in_float32(self.learning_rate) < math.inf:
            raise ValueError(f"optimizer.learning_rate must be positive, got {_shown(self.learning_rate)}")
        if self.warmup_steps < 0:
            raise ValueError(f"optimizer.warmup_steps must not be negative, got {self.warmup_steps}")
        if self.qk_clip is not None and not 0 < _in_float32(self.qk_clip) < math.inf:
            raise ValueError(f"optimizer.qk_clip must be positive, or null for none, got {_shown(self.qk_clip)}")
        bounds = {"b1": (0, 1), "b2": (0, 1), "eps": (0, math.inf), "weight_decay": (0, 10), "clip_norm": (0, math.inf)}
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            held = _in_float32(value)
            if not low <= held < high or (value and not held):
                raise ValueError(f"optimizer.{name} must be in [{low}, {high}), got {_shown(value)}")


def _own(section: OptimizerSection) -> Entry | None:
    """Returns the optimizer of a plugin that a recipe names, None for those here. Raises ValueError if it is not registered."""
    entry = entry_of(OPTIMIZER, section.name)
    if entry is None and section.name not in NAMES:
        raise ValueError(
            f"optimizer.name = {section.name!r} is unknown; use one of {', '.join([*NAMES, *names_of(OPTIMIZER)])}, or give "
            "plugins=[MODULE] with the module that registers it"
        )
    return entry


def fixed(section: OptimizerSection) -> dict[str, str]:
    """Returns the keys that the recipe's optimizer fixes, and their values; empty for AdamW."""
    entry = _own(section)
    if entry is None:
        # Newton–Schulz of one layer at a time would leave the other devices of a mesh without a matrix.
        return {"offload": "none"} if section.name == MUON else {}
    return {"moments": "float32"} | ({} if entry.value.elementwise else {"offload": "none"})


@dataclass(frozen=True)
class OwnOptimizer:
    """An optimizer as a plugin registers it, see `ejdist.plugins.register_optimizer`."""

    make: Callable[..., optax.GradientTransformation]
    elementwise: bool


def _scaling(s: OptimizerSection, matrices: Any = None) -> optax.GradientTransformation:
    """Returns the transformation of a gradient into a direction, before weight decay and learning rate."""
    entry = _own(s)
    if entry is not None:
        sizes = sizes_of(s, entry)
        transformation = entry.value.make() if sizes is None else entry.value.make(sizes)
        if not (hasattr(transformation, "init") and hasattr(transformation, "update")):
            raise ValueError(
                f"the optimizer {entry.name!r} of {entry.module} must return an optax.GradientTransformation, got "
                f"{transformation!r}"
            )
        return transformation
    scaling = optax.scale_by_adam(b1=s.b1, b2=s.b2, eps=s.eps, mu_dtype="float32")
    if s.name == MUON:
        if matrices is None:
            raise ValueError(
                "make_optimizer: optimizer.name = muon needs argument 'matrices', from matrices_for of the "
                "declared parameters"
            )
        scaling = scale_by_muon(matrices, s.muon, scaling)
    return _in_bfloat16(scaling) if s.moments == "bfloat16" else scaling


def matrices_for(s: OptimizerSection, declared: Any, placed: Any) -> Any:
    """Returns what Muon needs to know of a model, None for another optimizer; see `ejdist.training.muon.all_matrices`."""
    return all_matrices(declared, s.muon, placed) if s.name == MUON else None


def clip_for(sections: Any) -> Callable[[Any, Any], Any] | None:
    """Returns what QK-clip makes of the parameters after a step, see `ejdist.training.qk_clip.clipped`; None without it. Raises
    ValueError for a recipe in which it has no meaning, naming the key."""
    tau = sections.optimizer.qk_clip
    if tau is None:
        return None
    if sections.optimizer.name != MUON:
        raise ValueError(
            f"optimizer.qk_clip = {tau} goes with Muon, and optimizer.name = {sections.optimizer.name!r}: give optimizer=muon, "
            "or optimizer.qk_clip=null"
        )
    check_clip(tau, sections.model, sections.data.sequence_length)
    return partial(clipped, sections.model, tau)


def matrices_in(s: OptimizerSection, path: str, param: Param) -> Matrices | None:
    """Returns how Muon takes a parameter; None where AdamW, or another optimizer, does."""
    return matrices_of(path, param, path.rpartition(".")[2] in s.muon.also) if s.name == MUON else None


def state_bytes(s: OptimizerSection) -> int:
    """Returns the bytes of optimizer state for one element of a large matrix; Muon keeps half of it of those that it takes."""
    if _own(s) is None:
        return 2 * (2 if s.moments == "bfloat16" else 4)
    like = {"matrix": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    state = jax.eval_shape(_scaling(s).init, like)
    return round(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / 512**2)


def _in_float32(value: float) -> float:
    """Returns the value that the step uses: in float32, b1 = 0.99999999999 is 1, and eps = 1e39 is infinite."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _shown(value: float) -> str:
    held = _in_float32(value)
    return f"{value}" + (f", which is {held:g} in float32" if held != value and held in (0, 1, math.inf) else "")


def _warmup(section: OptimizerSection, steps: int) -> int:
    """Returns the number of warmup steps: at most all steps but the last, which has the peak."""
    return min(section.warmup_steps, max(steps - 1, 0))


def make_schedule(section: OptimizerSection, steps: int) -> optax.Schedule:
    """Returns step -> learning rate, for step = 0 to `steps` - 1; it ends at `final_ratio` times the peak.

    Raises:
      ValueError: names the key.
    """
    s = section
    s.validate()
    warmup = _warmup(s, steps)
    # From the first step at the peak to the last step of the run, which has the last rate.
    after = steps - 1 - warmup
    if s.schedule == "warmup_cosine":
        rest = optax.cosine_decay_schedule(s.learning_rate, max(after, 1), alpha=s.final_ratio)
    elif s.schedule == "constant":
        rest = optax.constant_schedule(s.learning_rate)
    else:
        decay = min(math.ceil(steps * s.decay_fraction), max(after, 0))
        fall = optax.linear_schedule(s.learning_rate, s.learning_rate * s.final_ratio, max(decay, 1))
        stable = optax.constant_schedule(s.learning_rate)
        rest = optax.join_schedules([stable, fall], [after - decay]) if decay else stable
    # Warmup does not start at 0: the rate is (step + 1) / warmup of the peak.
    rise = optax.linear_schedule(s.learning_rate / max(warmup, 1), s.learning_rate, max(warmup - 1, 1))
    return optax.join_schedules([rise, rest], [warmup]) if warmup else rest


@dataclass(frozen=True)
class Rate:
    """The learning rate of a run, or of a stage that has its own: the schedule of a section over the steps `start` + 1, ...,
    `start` + `steps` of the run."""

    section: OptimizerSection
    steps: int
    start: int = 0

    def __call__(self, step: Any) -> Any:
        """Returns the rate of the step after `step`."""
        return make_schedule(self.section, self.steps)(step - self.start)

    @property
    def notes(self) -> list[str]:
        """What a run logs of it: a warmup that is cut short."""
        asked, rises = self.section.warmup_steps, _warmup(self.section, self.steps)
        if asked == rises:
            return []
        return [
            f"optimizer.warmup_steps = {asked} does not fit into {self.steps} step{'s' * (self.steps > 1)}: the warmup takes "
            f"{rises}, and the last step has the peak; give fewer warmup steps, or more steps"
        ]

    def of(self, steps: np.ndarray) -> np.ndarray:
        """Returns the rates of the steps after each of `steps`, float32."""
        return np.broadcast_to(np.asarray(self(steps)), steps.shape)


def make_optimizer(
    section: OptimizerSection, steps: int, decayed: Any, rate: Rate | None = None, matrices: Any = None
) -> tuple[optax.GradientTransformation, Any]:
    """Returns (AdamW, Muon, or the optimizer of a plugin, with clipping, decay and rate; the schedule).

    Its update takes two more arguments, by name: `norm`, of the whole gradient, where it is called for a part of it; and `row`,
    where that part is one row of each stack.

    Args:
      steps: of the whole run; the schedule ends there.
      decayed: tree of bool, which parameters decay.
      rate: of a stage with its own; default: the section's over all steps.
      matrices: which parameters Muon takes, see `matrices_for`.

    Raises:
      ValueError: names the key.
    """
    section.validate()
    schedule = make_schedule(section, steps) if rate is None else rate
    s = section
    scaled = optax.chain(
        _scaling(s, matrices),
        optax.add_decayed_weights(s.weight_decay, lambda tree: _of_same_leaves(decayed, tree)),
        optax.scale_by_learning_rate(schedule),
    )
    clip = _clipping(s.clip_norm) if s.clip_norm > 0 else optax.identity()
    return optax.chain(clip, scaled), schedule


def moments_like(opt_state: Any, dtype: str) -> Any:
    """Returns an optimizer's state of `jax.ShapeDtypeStruct` whose moments have another dtype (`optimizer.moments`)."""

    def one(path: Any, leaf: Any) -> Any:
        names = {getattr(part, "name", None) for part in path}
        return leaf.update(dtype=jnp.dtype(dtype)) if names & {"mu", "nu"} else leaf

    return jax.tree_util.tree_map_with_path(one, opt_state)


def cast_moments(opt_state: Any, like: Any) -> Any:
    """Returns an optimizer's state with the dtypes of `like`, an array at a time: those of float32 are exact, those of bfloat16
    rounded to the nearest, once."""

    def one(x: jax.Array, like: Any) -> jax.Array:
        if x.dtype == like.dtype:
            return x
        on_device = like.sharding.with_memory_kind("device") if like.sharding.memory_kind == "pinned_host" else None
        target = on_device or like.sharding
        return jax.device_put(jnp.asarray(jax.device_put(x, target), like.dtype), like.sharding)

    return jax.tree.map(one, opt_state, like)


def _of_same_leaves(decayed: Any, tree: Any) -> Any:
    """Returns the mask of a tree in which some leaves may be None."""
    return jax.tree.map(lambda decays, x: None if x is None else decays, decayed, tree)


def _clipping(largest: float) -> optax.GradientTransformationExtraArgs:
    """Returns `optax.clip_by_global_norm`, for which the norm may be known already."""

    def update(updates: Any, state: Any, params: Any = None, *, norm: Any = None, **_: Any) -> tuple[Any, Any]:
        norm = optax.tree.norm(updates) if norm is None else norm
        within = jnp.squeeze(norm < largest)
        return jax.tree.map(lambda g: jnp.where(within, g, g / norm.astype(g.dtype) * largest), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _in_bfloat16(adam: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns Adam with moments that are stored in bfloat16. The update itself is in float32, and uses the moments of this step
    before they are rounded."""

    def stored(state: Any, count: Any, row: Any) -> Any:
        def one(which: str, path: Any, x: jax.Array) -> jax.Array:
            seed = seed_of(f"{which}.{jax.tree_util.keystr(path, simple=True, separator='.')}", count)
            return rounded(x, random_bits(seed, x.shape, row))

        mu, nu = (jax.tree_util.tree_map_with_path(partial(one, name), getattr(state, name)) for name in ("mu", "nu"))
        return state._replace(mu=mu, nu=nu)

    def cast(state: Any, dtype: Any) -> Any:
        return state._replace(mu=optax.tree.cast(state.mu, dtype), nu=optax.tree.cast(state.nu, dtype))

    def init(params: Any) -> Any:
        return cast(adam.init(params), jnp.bfloat16)

    def update(updates: Any, state: Any, params: Any = None, *, row: Any = None, **_: Any) -> tuple[Any, Any]:
        updates, new = adam.update(updates, cast(state, jnp.float32), params)
        return updates, stored(new, state.count, row)

    return optax.GradientTransformationExtraArgs(init, update)
