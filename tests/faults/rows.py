"""Faults of what must not grow with the steps of a run or with its hosts."""

from faults import Fault

ROWS, HOSTS, REPLICA = "tests/test_step_rows.py", "tests/test_hosts.py", "tests/test_one_replica.py"

FAULTS = (
    Fault(
        "a row goes on behind one whose write was cut off",
        "cut_after",
        "file.write(b'\\n')",
        "pass",
        f"{ROWS} -k cut_behind",
    ),
    Fault(
        "a line is cut in two where a read begins",
        "_lines_backwards",
        "file.read($begin - $first) + $rest",
        "file.read($begin - $first)",
        f"{ROWS} -k cut_behind",
    ),
    Fault(
        "the pictures of a long run hold all of its rows",
        "Thinned.passing",
        "len(self._kept) > self._most",
        "False",
        f"{ROWS} -k no_more",
    ),
    Fault(
        "speeds are those of any mesh",
        "summarise",
        "$of_mesh.setdefault($mesh, $$new)",
        "$of_mesh.setdefault(None, $$new)",
        f"{ROWS} -k read_once",
    ),
    Fault(
        "the tokens of all experts are in every row of the metrics",
        "MetricsWriter._write",
        "{$name: _for_json($value) for $name, $value in $row.items() if $name not in $tables}",
        "{$name: _for_json($value) for $name, $value in $row.items()}",
        "tests/test_layers.py -k tables",
    ),
    Fault(
        "a row about the hosts grows with them",
        "in_few",
        "sorted(sorted($own), key=lambda $host: -$own[$host])[:_SHOWN]",
        "sorted(sorted($own), key=lambda $host: -$own[$host])",
        "tests/test_goodput.py -k one_size",
    ),
    Fault(
        "a file of each process describes the arrays of a checkpoint",
        "array_handler",
        "ocp.PyTreeCheckpointHandler(type_handler_registry=$registry)",
        "ocp.PyTreeCheckpointHandler()",
        "tests/test_checkpoint.py -k no_file",
    ),
    Fault(
        "hosts that differ are taken for the same",
        "_first_other",
        "$values[$i][1] != $values[0][1]",
        "False",
        f"{HOSTS} -k difference",
    ),
    Fault(
        "every host sends its facts where two differ",
        "Hosts.compare",
        "dict($facts) if self.index in (0, $odd) else None",
        "dict($facts)",
        f"{HOSTS} -k only_two",
    ),
    Fault(
        "every host tokenizes what one has in a folder of all",
        "first_alone",
        "hosts.broadcast($what, limit=math.inf)",
        "pass",
        f"{HOSTS} -k one_makes",
    ),
    Fault(
        "a replica gets another zero than was saved",
        "_sum_of_bits",
        "jax.lax.bitcast_convert_type(jnp.sum($bits, axis=0, dtype=$bits.dtype), $x.dtype)",
        "jnp.sum($x, axis=0, dtype=$x.dtype)",
        f"{REPLICA} -k its_bits",
    ),
    Fault(
        "all replicas read a checkpoint",
        "read_once",
        "read(jax.tree.map(partial(_placed, $replica), $like))",
        "read($like)",
        f"{REPLICA} -k its_bits",
    ),
    Fault(
        "a host with devices of two replicas waits for itself",
        "one_replica",
        "$hosts & $elsewhere",
        "False",
        f"{REPLICA} -k whole_hosts",
    ),
    Fault(
        "all failures of a check go to all hosts",
        "_few",
        "$failures[:_NAMED]",
        "$failures",
        "tests/test_doctor.py -k does_not_grow",
    ),
    Fault(
        "replicas that are never compared are looked for",
        "Replicas.__init__",
        "if not $every:\n    return",
        "",
        "tests/test_guards.py -k never_compared",
    ),
)
