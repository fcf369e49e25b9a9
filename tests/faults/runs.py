"""Faults of what hosts say to each other, of how a run ends, and of what it goes on from."""

from faults import Fault

HOSTS, AGREEMENT = "ejdist/cluster/hosts.py", "ejdist/cluster/agreement.py"
OPENING, CHECKPOINT = "ejdist/training/opening.py", "ejdist/training/checkpoint.py"
TESTS, TRAIN, PROCESSES = "tests/test_hosts.py", "tests/test_train.py", "tests/test_many_processes.py"

FAULTS = (
    Fault(
        "processes of CPU devices read programs from a cache",
        "launch/train.py",
        'jax.config.update("jax_enable_compilation_cache", False)',
        "pass",
        "tests/test_cluster.py -k cache",
    ),
    Fault(
        "two runs are made in one folder",
        "ejdist/training/lock.py",
        "                if time.monotonic() >= end:\n                    raise\n",
        "                return None\n",
        "tests/test_run_files.py -k another_process",
    ),
    Fault(
        "what is there is looked at before the process that writes it has ended",
        "ejdist/training/opening.py",
        "    lock.take(say)  # before",
        "    # before",
        "tests/test_run_files.py -k while_another_waits",
    ),
    Fault(
        "a run that was begun in the meantime is gone over",
        "ejdist/training/steps.py",
        'if taken and (run.directory / "metrics.jsonl").exists():',
        "if False:",
        "tests/test_run_files.py -k of_the_first",
    ),
    Fault(
        "a folder stays taken by a run that has ended",
        "ejdist/training/lock.py",
        "    def __del__(self) -> None:\n        self.let_go()\n",
        "",
        "tests/test_run_files.py -k another_process",
    ),
    Fault(
        "what hosts were started with is not compared",
        HOSTS,
        "if json.dumps(there) != json.dumps(here):",
        "if False:",
        f"{TESTS} -k difference",
    ),
    Fault(
        "only the facts that host 0 has are compared",
        HOSTS,
        "for name in {**theirs, **mine}:",
        "for name in theirs:",
        f"{TESTS} -k only_some",
    ),
    Fault(
        "the host before the one that is missing is named",
        HOSTS,
        "absent = [i for i in range(1, self.count) if i not in said]",
        "absent = [i - 1 for i in range(1, self.count) if i not in said]",
        f"{TESTS} -k named_after_the_limit",
    ),
    Fault(
        "a wait for host 0 ends late",
        HOSTS,
        "end = time.monotonic() + limit\n",
        "end = time.monotonic() + 20 * limit\n",
        f"{TESTS} -k named_after_the_limit",
    ),
    Fault(
        "a host that fails keeps it to itself",
        HOSTS,
        "            tell_others(reason, wrong",
        "            dict(reason=reason, wrong",
        f"{TESTS} -k ends_the_waits",
    ),
    Fault(
        "files that only move are other code",
        AGREEMENT,
        'f"{name}/{path.relative_to(root)}\\0".encode() + path.read_bytes()',
        "path.read_bytes()",
        f"{TESTS} -k digest_of_the_code",
    ),
    Fault(
        "a folder of one's own counts as the one of the run",
        AGREEMENT,
        '"the folder of host 0" if seen else',
        '"the folder of host 0" if True else',
        f"{TESTS} -k must_be_one",
    ),
    Fault(
        "the file that hosts look for stays in the folder",
        AGREEMENT,
        "(directory / name).unlink(missing_ok=True)",
        "pass",
        f"{TESTS} -k must_be_one",
    ),
    Fault(
        "a damaged checkpoint ends the run",
        OPENING,
        "            damaged.append((step, where, error))",
        "            raise",
        f"{TRAIN} -k set_aside",
    ),
    Fault(
        "a damaged checkpoint is set aside where none is whole",
        OPENING,
        "            damaged.append((step, where, error))",
        "            damaged.append((step, where, error)); where.set_aside(step)",
        f"{TRAIN} -k nothing_is_touched",
    ),
    Fault(
        "what was set aside is a stranger",
        CHECKPOINT,
        'or _ASIDE in n or n.startswith(".")',
        'or n.startswith(".")',
        f"{TRAIN} -k set_aside",
    ),
    Fault(
        "other bits than were saved are taken",
        "ejdist/training/integrity.py",
        "changed = sorted(name for name in {*found, *written} if found.get(name) != written.get(name))\n    if changed:\n"
        '        raise Changed(f"{_named',
        'changed = sorted({*found} - {*written})\n    if changed:\n        raise Changed(f"{_named',
        f"{TRAIN} -k other_bits",
    ),
    Fault(
        "SIGTERM waits for the first step",
        "ejdist/cluster/ending.py",
        "    if not _stepping.is_set():\n        tell_others",
        "    if False:\n        tell_others",
        f"{PROCESSES} -k before_the_first_step",
    ),
    Fault(
        "a rehearsal does not compare the final state",
        "launch/rehearse.py",
        "same = rows == calm.losses and digest == calm.digest",
        "same = True",
        f"{PROCESSES} -k tells_a_run_apart",
    ),
    Fault(
        "a rehearsal that is told to stop leaves its processes",
        "launch/rehearse.py",
        "signal.signal(number, signal.default_int_handler)",
        "signal.signal(number, lambda *_: None)",
        f"{PROCESSES} -k ends_its_processes",
    ),
    Fault(
        "all runs of a rehearsal have one place of checkpoints",
        "launch/rehearse.py",
        "if recipe.checkpoint.dir is not None:",
        "if False:",
        f"{PROCESSES} -k no_place_of_the_recipe",
    ),
    Fault(
        "a drill of missing data has the recipe's tokenizer",
        "launch/drills.py",
        '"data.mixture=null", "data.tokenizer=bytes"]',
        '"data.mixture=null"]',
        f"{PROCESSES} -k lean_on",
    ),
    Fault(
        "the exit code of a host that failed is not passed on",
        "ejdist/cluster/hosts.py",
        "HostLost(said.text, said.code)\n\n    def judged",
        "HostLost(said.text)\n\n    def judged",
        f"{TESTS} -k code_of_the_one",
    ),
    Fault(
        "a step that waits for a host that failed ends as if it were lost",
        "ejdist/cluster/ending.py",
        "if said.code is not None:",
        "if False:",
        f"{TESTS} -k waits_for_a_host",
    ),
)
