"""A recipe's sections, and the training step built from them on a mesh. Nothing here runs, so a step can be compiled ahead of
time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import kernels
from ejdist.cluster.hosts import check_limit
from ejdist.experts.section import ExpertsSection
from ejdist.layout import ACTIVATIONS, PARAMETERS, replicated, set_layout, sharding
from ejdist.mesh import BATCH_AXES, SEQUENCE_AXES, TP, MeshSection
from ejdist.models.lora import LoRASection, build
from ejdist.models.model import Model, StepContext
from ejdist.models.ops import Ops
from ejdist.models.parameters import initialise, map_declared, num_parameters
from ejdist.operations import bind_ops
from ejdist.order import AUTO, CARRIED, NAMES, Order, platform_of
from ejdist.paths import check_folder, check_place
from ejdist.sections import compared, operational, validate
from ejdist.sequence.section import SequenceSection
from ejdist.training.changeable import check_allowed
from ejdist.training.checkpoint import CheckpointSection
from ejdist.training.curriculum import StageSection, stages_of
from ejdist.training.data import DataSection
from ejdist.training.guards import GuardsSection
from ejdist.training.losses import CROSS_ENTROPY, Trained, check_loss
from ejdist.training.offload import Offload, at_once
from ejdist.training.optimizer import OptimizerSection, Rate, clip_for, make_optimizer, matrices_for
from ejdist.training.step import TrainState, init_state, make_train_step, state_shardings
from ejdist.training.trackers import check_names
from kernels.framework.registry import Platform


@dataclass
class RunSection:
    """The `run` section of a recipe. When a run resumes, `check_same_run` compares `steps`, and the data cursor `seed`."""

    # Everything that the run writes; an existing run resumes. With checkpoint.dir elsewhere it is a folder of host 0 alone.
    dir: str = operational("outputs/run")
    steps: int = compared(200, recorded=True)  # steps of the whole run, where its schedule ends
    # Continue past the end of the schedule: rates follow the new run.steps from here on.
    extend: bool = operational(False)
    # Keys that affect the losses and may have other values than before when the run resumes; they hold from there on.
    allow_change: tuple[str, ...] = operational(())
    stop_after: int | None = operational(None)  # stop at this step, with a checkpoint; the schedule does not change
    seed: int = compared(0)  # of initial parameters and of the order of the data
    cpu_devices: int = operational(4)  # virtual devices where there is no accelerator and a mesh size is -1
    # Seconds that a host waits for the others at the start, and for a save to end.
    host_timeout: float = operational(900)
    # Where the numbers of steps go beside metrics.jsonl and TensorBoard: wandb.
    trackers: tuple[str, ...] = operational(())
    # Folder for compiled programs, which a later start reads; auto: in the cache folder on accelerators; null: none.
    compile_cache: str | None = operational("auto")
    profile: tuple[int, ...] = operational(())  # [FIRST,LAST]: a trace of these steps, in run.dir/profile

    def __post_init__(self) -> None:
        self.trackers, self.profile = tuple(self.trackers), tuple(self.profile)
        self.allow_change = tuple(self.allow_change)

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy; does not touch the disk."""
        if self.steps < 1:
            raise ValueError(f"run.steps must be at least 1, got {self.steps}")
        if self.stop_after is not None and self.stop_after < 1:
            raise ValueError(f"run.stop_after must be at least 1, or null to run all steps, got {self.stop_after}")
        if self.cpu_devices < 1:
            raise ValueError(f"run.cpu_devices must be at least 1, got {self.cpu_devices}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"run.seed must be in [0, 2**32), got {self.seed}")
        check_limit(self.host_timeout)
        check_names(self.trackers)
        if self.compile_cache is not None and self.compile_cache != "auto":
            check_place("run.compile_cache", self.compile_cache)
        if self.profile and not (len(self.profile) == 2 and 1 <= self.profile[0] <= self.profile[1] <= self.steps):
            raise ValueError(
                f"run.profile = {list(self.profile)} must be [FIRST,LAST], two steps from 1 to run.steps = {self.steps}"
            )
        if not self.dir.strip():
            raise ValueError("run.dir is empty: name a folder for what the run writes, for example outputs/first")
        remedy = "give a folder for metrics and pictures, and the URL as checkpoint.dir for the checkpoints"
        check_folder("run.dir", self.dir, remedy)


@dataclass
class EvaluationSection:
    """The `evaluation` section of a recipe: the loss of held-out data while the run trains."""

    # Steps between evaluations; the initial state and the last step are evaluated too. 0: never.
    every: int = operational(0)
    data: Any = operational(None)  # what data.source takes, read with the tokenizer and packing of the run's data
    batches: int = operational(8)  # of data.global_batch rows, the same at every evaluation; shorter data is used once
    # Prompts that the model answers at every evaluation, with its most likely tokens: ["def main():", "import"].
    samples: tuple[str, ...] = operational(())
    sample_tokens: int = operational(64)  # most tokens of such an answer

    def __post_init__(self) -> None:
        self.samples = tuple(self.samples)

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy."""
        if self.every < 0:
            raise ValueError(f"evaluation.every must be a number of steps, or 0 for never, got {self.every}")
        if self.batches < 1:
            raise ValueError(f"evaluation.batches must be at least 1, got {self.batches}")
        if self.sample_tokens < 1 or not all(isinstance(one, str) and one for one in self.samples):
            raise ValueError(
                f"evaluation.samples = {list(self.samples)} must be texts that are not empty, and evaluation.sample_tokens at "
                f"least 1, got {self.sample_tokens}"
            )
        if self.samples and not self.every:
            raise ValueError("evaluation.samples are written at evaluations: give evaluation.every and evaluation.data")
        if self.every and self.data is None:
            raise ValueError(
                f"evaluation.every = {self.every} needs held-out data: give evaluation.data, for example "
                "evaluation.data='held_out/*.txt'"
            )


@dataclass
class TrainSections:
    """All sections of a training run; `recipes.schema.Recipe` extends this. `check_history` compares `curriculum`."""

    run: RunSection = field(default_factory=RunSection)
    model: Any = None  # a section with `vocab_size` and `build()`, which returns a `Model`
    lora: LoRASection = field(default_factory=LoRASection)
    mesh: MeshSection = field(default_factory=MeshSection)
    sequence: SequenceSection = field(default_factory=SequenceSection)
    experts: ExpertsSection = field(default_factory=ExpertsSection)
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    guards: GuardsSection = field(default_factory=GuardsSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    # Stages of the run with data, rates, lengths, batches and meshes of their own, {until: 100, sequence_length: 512, ...}.
    curriculum: list[StageSection] = compared(default_factory=list)
    accumulation: int = 1  # microbatches of a step, whose gradients are summed before the update
    # What is trained: cross_entropy of the next token, or the name of a loss that a plugin registers.
    loss: str = CROSS_ENTROPY
    # Modules of the current folder, or installed, that register layers, sources, optimizers and losses: [my.module].
    plugins: tuple[str, ...] = operational((), recorded=True)
    z_loss: float = 1e-4  # weight of the squared log-sum-exp of the logits
    platform: str | None = operational(None)  # backend of every operation, for example xla; null: the fastest
    # Bitwise reproducible steps, even where a faster backend sums in arbitrary order.
    deterministic_attention: bool = operational(False)

    def __post_init__(self) -> None:
        self.plugins = tuple(self.plugins)

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy: for top-level keys, and for constraints between sections."""
        check_allowed(self)
        check_loss(self.loss)
        clip_for(self)
        if (ahead := getattr(self.model, "mtp", None)) is not None and ahead.modules:
            for key, other in (("lora.rank", self.lora.rank), ("loss", self.loss != CROSS_ENTROPY)):
                if other:
                    raise ValueError(
                        f"model.mtp.modules = {ahead.modules} is trained with the whole model and the cross entropy of the "
                        f"next token: leave {key} out, or give model.mtp.modules=0"
                    )
        if self.accumulation < 1:
            raise ValueError(f"accumulation must be at least 1, got {self.accumulation}")
        # Each stage of a curriculum has its own.
        if not self.curriculum and self.data.global_batch % self.accumulation:
            raise ValueError(
                f"data.global_batch = {self.data.global_batch} must be a multiple of accumulation = {self.accumulation}"
            )
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss must be finite and not negative, got {self.z_loss}; 0 for none")
        known = dict.fromkeys([*Platform, *(name for op in kernels.operations().values() for name in op.priority)])
        if self.platform is not None and self.platform not in known:
            raise ValueError(f"platform = {self.platform!r} is unknown; use null or one of {', '.join(known)}")
        for stage in stages_of(self) if self.curriculum else ():
            try:
                validate(stage.sections)
            except ValueError as error:
                raise ValueError(f"curriculum[{stage.number - 1}]: {error}") from error


@dataclass(frozen=True)
class Program:
    """A training step on a mesh, and the shardings of its arguments."""

    trained: Trained  # the model with its loss
    model: Model  # with what the loss keeps among its buffers
    mesh: jax.sharding.Mesh
    order: Order
    step: Any  # jitted (state, batch) -> (state, metrics); (state, batch, limits) where it skips spikes
    init: Any  # jitted () -> state
    # jitted ({"params": tree, "buffers": part -> some of its own}) -> state with these, which are donated; with {} as its
    # "params", those of `init`
    init_from: Any
    state: Any  # tree of jax.ShapeDtypeStruct with shardings
    batch: dict[str, jax.ShapeDtypeStruct]
    limits: jax.ShapeDtypeStruct | None  # where spikes are skipped: the largest loss and gradient norm of a good step
    num_parameters: int
    notes: list[str]  # the choices made, and why; complete once the step is lowered

    @property
    def groups(self) -> int:
        """How many groups of devices share the rows of a batch."""
        return groups_of(self.mesh)

    def lower(self) -> Any:
        """Returns the step lowered for the shapes of its arguments."""
        return self.step.lower(self.state, self.batch, *(() if self.limits is None else (self.limits,)))


def groups_of(mesh: Any) -> int:
    """Returns how many groups of devices share the rows of a batch; the mesh may be abstract."""
    return math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)


def check_sizes(sections: TrainSections, model: Model, mesh: Any) -> Order:
    """Checks a recipe's sizes against a mesh, which may be abstract, and returns the order of its tokens there.

    Args:
      sections: checked by `ejdist.sections.validate`.

    Raises:
      ValueError: a size of the recipe or of its model does not fit the mesh; names the key, and the remedy.
    """
    s = sections
    length, rows = s.data.sequence_length, s.data.global_batch
    order = s.sequence.over(MeshSection.sequence_shards(mesh), length, platform_of(mesh))
    order.check(length)
    if order.carried and model.fixed:
        raise ValueError(
            f"sequence.order = {order.name!r} is another one for each row, and layers with {model.fixed[0]} have no form "
            f"for it: use {', '.join(name for name in NAMES if name not in CARRIED)} or {AUTO}"
        )
    part = (rows // s.accumulation, length)
    sharding(mesh, ("B", "T"), ACTIVATIONS, shape=part, what="a microbatch (data.global_batch, data.sequence_length)")
    groups = groups_of(mesh)
    where = f"data.global_batch = {rows}, accumulation = {s.accumulation}, {groups} groups of devices"
    s.experts.check_dispatch(mesh.shape, model.mixed)
    s.experts.check_rows(rows // s.accumulation // groups, mesh.shape, model.mixed, where)
    for key, (dim, size) in model.split.items():
        sharding(mesh, (dim,), s.experts.table(ACTIVATIONS), shape=(size,), what=f"model.{key}")
        over = tuple((a, n) for a in SEQUENCE_AXES if (n := mesh.shape.get(a, 1)) > 1)
        # Only attention's heads are moved by the scheme.
        if key == "num_heads" and over and (reason := s.sequence.made().rejects(size // mesh.shape.get(TP, 1), over)):
            raise ValueError(f"sequence.scheme = {s.sequence.scheme!r} and model.{key} = {size}: {reason}")
    return order


def param_shardings(sections: TrainSections, declared: Any, mesh: Any, kind: str = "parameter") -> Any:
    """Returns the tree of shardings of the stored parameters; the mesh may be abstract.

    Raises:
      ValueError: a dim does not divide; names the parameter.
    """
    table = sections.experts.table(PARAMETERS)
    return map_declared(
        lambda path, p: sharding(mesh, p.dims.split(), table, shape=p.shape, what=f"{kind} {path}"), declared
    )


def make_program(sections: TrainSections, mesh: jax.sharding.Mesh, rate: Rate | None = None) -> Program:
    """Builds the training step of a recipe on a mesh. Runs and allocates nothing, so it can be compiled ahead of time.

    Args:
      rate: of a stage with a learning rate of its own; default: the recipe's over all steps.

    Raises:
      ValueError: a section is wrong, or a size does not fit the mesh; names the parameter or key, and the remedy.
    """
    validate(sections)
    s, trained = sections, Trained(sections, build(sections.model, sections.lora))
    model = trained.with_references()
    order = check_sizes(s, model, mesh)
    length, rows = s.data.sequence_length, s.data.global_batch
    notes: list[str] = []
    if s.curriculum:
        notes.append(
            f"this program uses the base recipe's data.sequence_length, data.global_batch, mesh and positions, not one of the "
            f"curriculum's {len(s.curriculum)} stages. For a stage's program, give its keys and curriculum=[]"
        )
    ops = bind(s, mesh, order, notes.append)
    decayed = map_declared(lambda _, p: p.decay, model.declared)
    placed = param_shardings(s, model.declared, mesh)
    matrices = matrices_for(s.optimizer, model.declared, placed)
    optimizer, schedule = make_optimizer(s.optimizer, s.run.steps, decayed, rate, matrices)
    offload = Offload(model.declared) if s.optimizer.offload == "host" else None
    if offload is not None:
        optimizer = offload.transformation(optimizer)

    def loss(params: Any, batch: dict[str, jax.Array], *, context: StepContext) -> Any:
        with set_layout(order=order):  # for operations that a part calls directly, not through `ops`
            return trained.loss(params, batch, ops, context)

    key = jax.random.key(s.run.seed)

    def make_state() -> TrainState:
        params = initialise(model.declared, key)
        return init_state(params, optimizer, trained.start(params, initialise(model.buffers, key)))

    def take_state(loaded: dict[str, Any]) -> TrainState:
        buffers = {part: new | loaded["buffers"].get(part, {}) for part, new in initialise(model.buffers, key).items()}
        drawn = initialise(model.declared, key)  # of adapters, which no source has
        params = loaded["params"] or drawn
        return init_state(params, optimizer, trained.start(params, buffers))

    shapes = jax.eval_shape(make_state)
    shardings = state_shardings(shapes, placed, replicated(mesh))._replace(
        buffers=param_shardings(s, model.buffers, mesh, "buffer")
    )
    if offload is not None:
        shardings = shardings._replace(opt_state=offload.shardings(shardings.opt_state))
    state = jax.tree.map(
        lambda x, placement: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement), shapes, shardings
    )
    placement = sharding(mesh, ("B", "T"), ACTIVATIONS, shape=(rows, length), what="the batch (data.global_batch)")
    fields = ("tokens", "targets", "positions", "segment_ids", *(("order",) if order.carried else ()))
    batch = {name: jax.ShapeDtypeStruct((rows, length), np.int32, sharding=placement) for name in fields}
    limits = None
    if "spike" in s.guards.skip:
        limits = jax.ShapeDtypeStruct((2,), np.float32, sharding=replicated(mesh))
    beside = () if limits is None else (limits.sharding,)

    narrow = None if offload is None else offload.gradient_dtypes(getattr(s.model, "compute_dtype", "float32"))

    def place(grads: Any) -> Any:
        grads = jax.lax.with_sharding_constraint(grads, placed)
        return grads if narrow is None else jax.tree.map(lambda g, dtype: g.astype(dtype), grads, narrow)

    step = jax.jit(
        make_train_step(
            loss,
            optimizer,
            accumulation=s.accumulation,
            accumulate=s.optimizer.accumulate,
            place=place,
            update=model.update,
            report=model.report,
            schedule=schedule,
            skip=s.guards.skip,
            stream=at_once if offload is None else offload.stream,
            clip=clip_for(s),
        ),
        donate_argnums=0,
        in_shardings=(shardings, {name: x.sharding for name, x in batch.items()}, *beside),
        out_shardings=(shardings, replicated(mesh)),
        compiler_options=s.sequence.compiler_options(mesh, order),
    )
    init = jax.jit(make_state, out_shardings=shardings)
    init_from = jax.jit(take_state, donate_argnums=0, out_shardings=shardings)
    count = num_parameters(model.declared)
    if model.base is not None:
        adapters, count = count, count + num_parameters(model.base.declared)
        names = ", ".join(model.declared["layers"])
        notes.append(f"lora.rank = {s.lora.rank} trains {adapters:,} of {count:,} parameters, the adapters of {names}")
    return Program(trained, model, mesh, order, step, init, init_from, state, batch, limits, count, notes)


def bind(sections: TrainSections, mesh: jax.sharding.Mesh | None, order: Order | None, on_choice: Any) -> Ops:
    """Returns the operations of a recipe on a mesh, or on one device: its order, ring, kernels and experts."""
    s = sections
    return bind_ops(
        mesh,
        order=order,
        scheme=s.sequence.made(),
        platform=s.platform,
        deterministic_attention=s.deterministic_attention,
        experts=vars(s.experts),
        largest_logits=s.optimizer.qk_clip is not None,
        on_choice=on_choice,
    )
