"""Of the layer of experts over a mesh, its run, and the table of embeddings."""

from faults import Fault

MESH, RUN, TABLE = "tests/test_experts_mesh.py", "tests/test_moe_run.py", "tests/test_embedding.py"

FAULTS = (
    Fault(
        "experts on a mesh: of tokens that all ranks have, the experts of the first rank alone",
        "_of_own_experts",
        "$experts - jax.lax.axis_index($axis) * $own",
        "$experts + 0 * jax.lax.axis_index($axis)",
        f"{MESH} -k all_ranks_have",
    ),
    Fault(
        "experts on a mesh: tokens that all ranks have are sent by every one",
        "placed:_compiled",
        "_of_own_experts if $p.alike else _flat",
        "_flat",
        f"{MESH} -k all_ranks_have",
    ),
    Fault(
        "experts on a mesh: every part of F adds the bias",
        "placed:_compiled.body",
        "jnp.where(jax.lax.axis_index($axes['F']) == 0, $params['down_bias'], 0)",
        "$params['down_bias'] + 0 * jax.lax.axis_index($axes['F'])",
        f"{MESH} -k 'test_places and all'",
    ),
    Fault(
        "experts on a mesh: what one rank dropped is told for all",
        "placed:_compiled.body",
        "jax.lax.psum($traffic.dropped, $split)",
        "jax.lax.pmax($traffic.dropped, $split)",
        f"{MESH} -k room",
    ),
    Fault(
        "experts on a mesh: ranks are told each other's counts",
        "moe",
        "$stats.counts.reshape($place.ranks, $E // $place.ranks).sum(-1)",
        "$stats.counts.reshape($place.ranks, $E // $place.ranks).sum(-1)[::-1]",
        f"{RUN} -k says",
    ),
    Fault(
        "experts on a mesh: a scheme asked for by name is chosen again",
        "how:chosen",
        "if $how.scheme != 'auto' and $how.chunks is not None: return $how",
        "$how = replace($how, scheme='auto')",
        f"{MESH} -k illegal_calls",
    ),
    Fault(
        "experts on a mesh: where experts lie is not asked",
        "_axes",
        "$axes['E'] = tuple(($a for $a in $named if $mesh.shape[$a] > 1)) if $named else $axes['E']",
        "",
        f"{MESH} -k 'test_places and two_level'",
    ),
    Fault(
        "experts on a mesh: a capacity may change in a run",
        "ExpertsSection.capacity",
        "capacity: float | None = None",
        "capacity: float | None = operational(None)",
        f"{RUN} -k refused",
    ),
    Fault(
        "experts on a mesh: the load is in every row",
        "MetricsWriter._write",
        "not self._tables_every or ($step % self._tables_every and $step not in (1, self._total))",
        "not self._tables_every",
        "tests/test_layers.py -k tables",
    ),
    Fault(
        "experts on a mesh: the largest load is of a microbatch",
        "Experts.report",
        "max_violation($counts)",
        "max_violation($counts) * 0.5",
        f"{RUN} -k says",
    ),
    Fault(
        "embedding: tokens of another part of the vocabulary count here",
        "_mapped.body",
        "($own >= 0) & ($own < $table.shape[0])",
        "$own < $table.shape[0]",
        TABLE,
    ),
    Fault(
        "embedding: the width of another device",
        "_mapped.body",
        "jax.lax.all_gather($table, $width, axis=1, tiled=True)",
        "jax.lax.all_gather($table, $width, axis=1, tiled=True)[:, ::-1]",
        TABLE,
    ),
    Fault(
        "a run learns that tokens cannot get to its experts from moe",
        "check_sizes",
        "s.experts.check_dispatch(mesh.shape, model.mixed)",
        "pass",
        "tests/test_plan_others.py -k only_as",
    ),
)
