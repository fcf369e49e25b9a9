"""Every scheme, order, mask, number of heads and mesh of attention over a split sequence has the numbers of one device, in
value and in every gradient: rows that have each legal pair of them. Files of a scheme have more of its own."""

import functools
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_ulysses import HEADS, IDS, MASKS, MESHES, assert_close, drawn, on_one_device

from ejdist import Order, make_mesh, ring_attention
from ejdist.documents import places
from ejdist.sequence import AllGather, GroupCast, Halo, Ring, Ulysses
from kernels import MaskInfo

STRIPE = 4
# On CPUs XLA may begin a transfer before the one before it has ended, and tells them apart by a number that JAX gives to all:
# they wait for each other, or one takes what the other sent, or XLA ends the process; with this flag less often. A ring both
# ways round and one of two levels have several on their way: tests/test_both_ways.py and test_sequence.py have these.
IN_TURN = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
UNSTEADY = "the same program has other numbers in another run, as where XLA takes one transfer for another"
PARTS = 12
# What a row runs and is compared by, as paths of git. Other operations have no part in it.
CODE = (
    ":(glob)ejdist/*.py",
    "ejdist/sequence/*.py",
    "kernels/engines/attention/*.py",
    "kernels/engines/matmul/*.py",
    "kernels/framework/*.py",
    "kernels/ops/flash_attention/*.py",
    "tests/test_ulysses.py",
)
SCHEMES = {
    "ring": Ring(),
    "ring_of_documents": Ring(hops="batch"),
    "all_gather": AllGather(),
    "all_gather_of_documents": AllGather(hops="batch"),
    "ulysses": Ulysses(),
    "ulysses_in_groups": Ulysses(head_groups=2),
    "gathered_between_groups": Ulysses(AllGather()),
    "halo_between_groups": Ulysses(Halo()),
    "halo": Halo(),
    "group_cast": GroupCast(0.5),
}
OF_TWO_AXES = ("gathered_between_groups", "halo_between_groups")
# What counts from the start of a document has no form in an order of each row, and is refused there.
COUNTS_IN_DOCUMENTS = ("packed_chunk", "packed_sink_window")
FACTORS = {
    "scheme": tuple(SCHEMES),
    "order": ("contiguous", "zigzag", "striped", "balanced"),
    "mask": tuple(MASKS),
    "heads": HEADS,
    "mesh": MESHES,
}


def legal(row):
    (cp, sp, tp), (heads, kv_heads) = row["mesh"], row["heads"]
    over = (("cp", cp),) * (cp > 1) + (("sp", sp),) * (sp > 1)
    return (
        (row["scheme"] not in OF_TWO_AXES or len(over) == 2)
        and (kv_heads == 1 or kv_heads % tp == 0)
        and not (row["order"] == "balanced" and row["mask"] in COUNTS_IN_DOCUMENTS)
        and SCHEMES[row["scheme"]].rejects(heads // tp, over) is None
    )


@functools.cache
def whole():
    """Returns every legal row."""
    rows = (dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values()))
    return [row for row in rows if legal(row)]


def together(row):
    """Returns what rows share that one process makes in turn, since their programs have much in common."""
    return row["mask"], row["heads"], row["mesh"]


def in_groups(rows, part, parts):
    """Returns the rows of every parts-th group, which are of all kinds from the first group on."""
    groups = {}
    for row in sorted(rows, key=lambda row: FACTORS["order"].index(row["order"])):
        groups.setdefault(together(row), []).append(row)
    every = [*groups.values()]
    random.Random(0).shuffle(every)
    return [row for group in every[part::parts] for row in group]


def pairs_of(row):
    return [*itertools.combinations(row.items(), 2)]


@functools.cache
def covering():
    """Returns rows that have every legal pair of two factors' values."""
    rng, rows = random.Random(0), []
    having = {}
    for row in whole():
        for pair in pairs_of(row):
            having.setdefault(pair, []).append(row)
    left = dict.fromkeys(having)
    while left:
        some = having[next(iter(left))]
        rows.append(
            max(rng.sample(some, min(len(some), 40)), key=lambda row: sum(pair in left for pair in pairs_of(row)))
        )
        for pair in pairs_of(rows[-1]):
            left.pop(pair, None)
    return rows


def name_of(row):
    (cp, sp, tp), (heads, kv_heads) = row["mesh"], row["heads"]
    return f"{row['scheme']}-{row['order']}-{row['mask']}-{heads}_{kv_heads}-cp{cp}_sp{sp}_tp{tp}"


def outputs_and_gradients(function, order, mask, heads, programs):
    """Returns out, lse and every gradient, in the order of the text; `test_ulysses` has it for orders that are fixed.

    A program is compiled unless `programs` has it by its text.
    """
    index = order.text_indices(np.where(IDS >= 0, places(IDS) + 1, 0)) if order.carried else None
    *arrays, sinks, slopes = drawn(*heads)
    options = {n: order.permute(x, index=index) if n.endswith("segment_ids") else x for n, x in MASKS[mask].items()}
    floats = {}
    if "softmax_aux" in options:
        floats["softmax_aux"] = sinks[:, 0] if options.pop("softmax_aux") == 1 else sinks
    if options.pop("alibi_slopes", 0):
        floats["alibi_slopes"] = slopes
    if "prefix" in options:
        options["mask_info"] = MaskInfo(prefix_lengths=jnp.asarray(options.pop("prefix"), jnp.int32))
    if index is not None:
        options |= {"q_positions": jnp.asarray(index), "kv_positions": jnp.asarray(index)}

    @jax.jit
    def run(q, k, v, d_out, d_lse, floats):
        def attend(q, k, v, floats):
            return function(q, k, v, **floats, **options, return_lse=True)

        (out, lse), pull = jax.vjp(attend, q, k, v, floats)
        # A row with no key has lse -inf; its cotangent must not matter.
        return out, lse, *pull((d_out, jnp.where(jnp.isfinite(lse), d_lse, 0)))

    given = (*(order.permute(x, index=index) for x in arrays), floats)
    lowered = run.lower(*given)
    text = lowered.as_text()
    # Constants are in the text, and so are the mesh and its sizes. Schemes that agree for a mask have one program.
    if text not in programs:
        programs[text] = lowered.compile()
    *results, others = programs[text](*given)
    found = [order.inverse(np.asarray(x), index=index) for x in results]
    return found + [np.asarray(others[name]) for name in sorted(others)]


def check(row, programs):
    cp, sp, tp = row["mesh"]
    order = Order(row["order"], cp * sp, STRIPE if row["order"] in ("striped", "balanced") else 1)
    mesh = make_mesh(cp=cp, sp=sp, tp=tp)
    split = functools.partial(ring_attention, mesh=mesh, order=order, scheme=SCHEMES[row["scheme"]])
    run = functools.partial(outputs_and_gradients, split, order, row["mask"], row["heads"], programs)
    got = run()
    try:
        assert_close(got, on_one_device(row["mask"], row["heads"]), name_of(row))
    except AssertionError as error:
        if [x.tobytes() for x in got] == [x.tobytes() for x in run()]:
            raise
        raise AssertionError(UNSTEADY) from error


def in_turn():
    """Returns the environment of a process in which transfers begin one by one, and which keeps no program."""
    flags = [os.environ.get("XLA_FLAGS", ""), IN_TURN]
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    kept = {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": "false"}
    return os.environ | kept | {"PYTHONPATH": ":".join(paths), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}


def outcomes(names):
    """Yields each row and, of one that failed, what it said. A process makes them until one fails or XLA ends it.

    A row is repeated, and said to be, if XLA mistook a transfer: it ended the process, or the program is not steady.
    """
    left, ended = [*names], 0
    while left:
        with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as errors:
            given.write("\n".join(left))
            given.seek(0)
            streams = {"stdin": given, "stdout": subprocess.PIPE, "stderr": errors}
            process = subprocess.Popen([sys.executable, __file__, "rows"], env=in_turn(), text=True, **streams)
            for line in process.stdout:
                assert line.strip() == left.pop(0), line
                ended = 0
                yield line.strip(), ""
            status = process.wait()
            errors.seek(0)
            said = errors.read()[-3000:]
        mistook = (status == -signal.SIGABRT and "rendezvous" in said) or UNSTEADY in said
        ended += 1
        if left and mistook and ended < 3:  # a row of which three processes end in turn has failed
            print(f"again, with status {status}: {left[0]}", flush=True)
        elif left:
            ended = 0
            yield left.pop(0), f"status {status}: {said}"


def commit():
    """Returns the last commit that changed the code of rows; raises where files of it have changed since."""
    ask = functools.partial(subprocess.run, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    changed = ask(["git", "status", "--porcelain", "--", *CODE]).stdout
    if changed:
        raise SystemExit(f"done=FILE says at which commit a row passed: commit first\n{changed}")
    return ask(["git", "log", "-1", "--format=%H", "--", *CODE]).stdout.strip()


def same(before):
    """Says whether the code was the same at a commit before."""
    command = ["git", "diff", "--quiet", before, "HEAD", "--", *CODE]
    return subprocess.run(command, cwd=Path(__file__).parents[1]).returncode == 0


def make(rows, workers, file):
    """Makes rows in some processes at once, without those that a file has for this code; returns how many failed."""
    names, passed, failed, begin, lock = {name_of(row) for row in rows}, set(), [], time.time(), threading.Lock()
    if file:
        now, path = commit(), Path(file)
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        good = {c for c in {c for c, _ in lines} if same(c)}
        passed = {name for c, name in lines if c in good} & names
    left, before = [row for row in rows if name_of(row) not in passed], len(passed)
    print(f"{before} of {len(names)} rows have passed before", flush=True)

    def work(some):
        for name, said in outcomes([name_of(row) for row in some]):
            with lock:
                if said:
                    failed.append(name)
                    print(f"FAILED {name}: {said}", flush=True)
                    continue
                passed.add(name)
                if file:
                    with path.open("a") as out:
                        out.write(f"{now} {name}\n")
                if (len(passed) - before) % 100 == 0:
                    each = (time.time() - begin) / (len(passed) - before)
                    print(f"{len(passed)} of {len(names)} rows have passed, {each:.2f} s each", flush=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, (in_groups(left, i, workers) for i in range(workers))))
    print(f"{len(passed)} of {len(names)} rows have passed, {len(failed)} failed", *failed, sep="\n", flush=True)
    return len(failed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_the_numbers_of_one_device(part):
    """Of every pair of factors; `ejdist/sequence/README.md` says how the whole product is run."""
    for name, said in outcomes([name_of(row) for row in covering()[part - 1 :: PARTS]]):
        assert not said, f"{name}: {said}"


ENDS = """
import os, sys
for name in sys.stdin.read().split():
    with open("seen", "a+") as seen:
        seen.write(name)
        seen.seek(0)
        before = seen.read().count(name)
    if name == "c" or (name == "b" and before < 3):
        print("rendezvous", file=sys.stderr, flush=True)
        os.abort()
    assert name != "f" or before > 2, "UNSTEADY"
    assert name != "d", "another number"
    print(name, flush=True)
"""


def test_rows_go_on_after_one_that_ends_a_process(tmp_path, monkeypatch):
    """XLA's own end is tried again, three times in turn, and so are numbers that change; numbers that differ are not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ends.py").write_text(ENDS.replace("UNSTEADY", UNSTEADY))
    monkeypatch.setitem(globals(), "__file__", str(tmp_path / "ends.py"))
    said = dict(outcomes("abcdef"))
    assert [*said] == [*"abcdef"] and [said[name] for name in "abef"] == [""] * 4
    assert "rendezvous" in said["c"] and "another number" in said["d"]
    assert [(tmp_path / "seen").read_text().count(name) for name in "abcdef"] == [1, 3, 3, 1, 1, 3]


def test_a_program_that_has_other_numbers_in_another_run(monkeypatch):
    """Numbers that differ from one device's fail as they are, unless the program itself gives others when it runs again."""
    row, ones = covering()[0], [np.ones(3)]
    for second, words in ((np.zeros(3), "another run"), (np.full(3, 2.0), "differ")):
        runs = iter([[np.full(3, 2.0)], [second]])
        monkeypatch.setitem(globals(), "outputs_and_gradients", lambda *_, runs=runs: next(runs))
        monkeypatch.setitem(globals(), "on_one_device", lambda *_: ones)
        monkeypatch.setitem(globals(), "assert_close", differs)
        with pytest.raises(AssertionError, match=words):
            check(row, {})


def differs(*_):
    raise AssertionError("they differ")


def test_a_file_of_finished_rows(tmp_path, monkeypatch, capsys):
    """Those of this code are not made again, those of another code and those that failed are."""
    rows, asked, bad = covering()[:6], [], name_of(covering()[5])

    def some(names):
        asked.extend(names)
        return ((name, "differs" * (name == bad)) for name in names)

    for name, stand_in in (("outcomes", some), ("commit", lambda: "new"), ("same", {"new": True, "old": False}.get)):
        monkeypatch.setitem(globals(), name, stand_in)
    names, file = [name_of(row) for row in rows], tmp_path / "done.txt"
    file.write_text(f"new {names[0]}\nold {names[1]}\nnew not-of-these\n")
    assert make(rows, 2, file) == 1 and sorted(asked) == sorted(names[1:])
    assert "5 of 6 rows have passed, 1 failed\n" + bad in capsys.readouterr().out
    asked.clear()
    assert make(rows, 2, file) == 1 and asked == [bad]


def test_groups_are_split_whole():
    parts = [in_groups(covering(), part, 5) for part in range(5)]
    assert sorted(map(name_of, itertools.chain(*parts))) == sorted(map(name_of, covering()))
    assert sum(len({*map(together, part)}) for part in parts) == len({*map(together, covering())})


@pytest.mark.slow
def test_the_rows_have_every_pair():
    assert {pair for row in covering() for pair in pairs_of(row)} == {pair for row in whole() for pair in pairs_of(row)}


def rows_given():
    """Makes the rows whose names come in; prints each that has passed."""
    gc.freeze()  # traces have no cycles, and what is there by now stays
    gc.set_threshold(150_000, 10, 10)
    rows, before, programs = {name_of(row): row for row in whole()}, None, {}
    for i, name in enumerate(sys.stdin.read().split(), 1):
        if together(rows[name]) != before:
            before = together(rows[name])
            programs.clear()
        check(rows[name], programs)
        print(name, flush=True)
        if i % 50 == 0:
            jax.clear_caches()


if __name__ == "__main__":
    if sys.argv[1] == "rows":
        rows_given()
        sys.exit()
    import conftest  # noqa: F401  the flags of tests

    options = dict(argument.split("=", 1) for argument in sys.argv[2:] if "=" in argument)
    number, parts = map(int, ([a for a in sys.argv[2:] if "=" not in a] or ["1/1"])[0].split("/"))
    chosen = in_groups({"covering": covering, "whole": whole}[sys.argv[1]](), number - 1, parts)
    sys.exit(make(chosen, int(options.get("workers", os.cpu_count())), options.get("done")) > 0)
