"""Faults of guards: what is skipped or gone past, replicas, hosts that hang or are slow, and the goodput ledger."""

from faults import Fault

STEP, GUARDS, REPLICAS = "ejdist/training/step.py", "ejdist/training/guards.py", "ejdist/training/replicas.py"
GOODPUT, PACE, WATCHDOG = "ejdist/training/goodput.py", "ejdist/training/pace.py", "ejdist/cluster/watchdog.py"
TESTS, LEDGER = "tests/test_guards.py", "tests/test_goodput.py"

FAULTS = (
    Fault(
        "a host that finds out who holds up the others is ended by their telling it so",
        "ejdist/cluster/ending.py",
        "if not ended.wait(_GRACE) and not _finding_out.is_set():",
        "if not ended.wait(_GRACE):",
        "tests/test_hosts.py -k ends_with_its_code",
    ),
    Fault(
        "a line of the ledger that is no record ends a run in a traceback",
        GOODPUT,
        "if isinstance(row, dict) and _is_row(row)]",
        "if isinstance(row, dict)]",
        f"{LEDGER} -k no_record",
    ),
    Fault(
        "what stands after a damaged row of metrics is lost",
        "ejdist/training/metrics.py",
        "    return [row for row in found if isinstance(row, dict) and _is_row(row)]",
        "    import itertools\n\n    return list(itertools.takewhile(lambda r: isinstance(r, dict) and _is_row(r), found))",
        "tests/test_run_files.py -k no_metrics",
    ),
    Fault(
        "rows of a run with large steps are taken for damaged ones",
        "ejdist/training/metrics.py",
        "is_number(row[name], most=2.0**200)",
        "is_number(row[name])",
        "tests/test_run_files.py -k no_metrics",
    ),
    Fault(
        "skip still updates the moments",
        STEP,
        "is_leaf=counts_steps)._replace(step=new.step)",
        "is_leaf=counts_steps)._replace(step=new.step, opt_state=new.opt_state)",
        f"{TESTS} -k changes_nothing_else",
    ),
    Fault(
        "a skipped step does not count in the schedule",
        STEP,
        "return new if counts_steps(new) else jnp.where(wrong, old, new)",
        "return jax.tree.map(lambda n, o: jnp.where(wrong, o, n), new, old)",
        f"{TESTS} -k changes_nothing_else",
    ),
    Fault(
        "only the loss can be no number",
        STEP,
        "wrong |= ~(jnp.isfinite(loss) & jnp.isfinite(norm))",
        "wrong |= ~jnp.isfinite(loss)",
        f"{TESTS} -k changes_nothing_else",
    ),
    Fault(
        "rewind reads the offending batch again",
        GUARDS,
        "[restored + 1, self.number(bad) + 1 - kept.number(restored + 1)]",
        "[restored + 1, self.number(bad) - kept.number(restored + 1)]",
        f"{TESTS} -k no_step_takes",
    ),
    Fault(
        "a rewind is forgotten by the checkpoints after it",
        GUARDS,
        "return [r for r in self.rewinds if r[0] <= step]",
        "return []",
        f"{TESTS} -k no_step_takes",
    ),
    Fault(
        "a bad step counts among those that spikes are told from",
        GUARDS,
        "                self._bad(step, s.spike, f",
        "                self._good.append([step, loss, norm]); self._bad(step, s.spike, f",
        f"{TESTS} -k long_enough_ago",
    ),
    Fault(
        "what is a spike depends on when the run saved",
        GUARDS,
        "if row[0] < step - LAG]",
        "if row[0] < step]",
        f"{TESTS} -k began_again",
    ),
    Fault(
        "skips in a row are counted from a restart on",
        GUARDS,
        'self._skips: int = kept.get("skips", 0)',
        "self._skips: int = 0",
        f"{TESTS} -k in_a_row",
    ),
    Fault(
        "parameters are not looked at before a save",
        "ejdist/training/steps.py",
        "                watch.before_save(step, state.params)",
        "                pass",
        f"{TESTS} -k end_well",
    ),
    Fault(
        "parameters that are infinite are saved",
        GUARDS,
        "jnp.isfinite(x).all()",
        "(~jnp.isnan(x)).all()",
        f"{TESTS} -k are_not_finite",
    ),
    Fault(
        "replica check compares only host 0",
        REPLICAS,
        "            for device in group:\n",
        "            for device in (d for d in group if owner[d][0] == 0):\n",
        f"{TESTS} -k differs_over_hosts",
    ),
    Fault(
        "replicas are not compared before a save",
        REPLICAS,
        "if saves or step % self.every == 0:",
        "if step % self.every == 0:",
        f"{TESTS} -k another_bit",
    ),
    Fault(
        "a host that fires first is taken for dead",
        WATCHDOG,
        "if h in first and said[2] == first[h][1][2]]",
        "if h in first]",
        f"{TESTS} -k holds_up",
    ),
    Fault(
        "the watchdog fires in the first step",
        WATCHDOG,
        "if where.doing == saves or where.made == 0 else",
        "if where.doing == saves else",
        f"{TESTS} -k do_not_end",
    ),
    Fault(
        "a host that waits for its data is not slow",
        PACE,
        'own = {host: times["host"] + times["data_wait"]',
        'own = {host: times["host"]',
        f"{TESTS} -k slow_hosts",
    ),
    Fault(
        "ledger loses a restart",
        GOODPUT,
        '            if row.get("start"):\n',
        '            if row.get("start") and False:\n',
        f"{LEDGER} -k made_again",
    ),
    Fault(
        "steps that were made again count twice",
        GOODPUT,
        '        if "resumed" in row:\n',
        '        if "resumed" in row and False:\n',
        f"{LEDGER} -k made_again",
    ),
    Fault(
        "a row after a torn one is torn too",
        GOODPUT,
        "        if torn:\n",
        "        if False:\n",
        f"{LEDGER} -k cut_off",
    ),
)
