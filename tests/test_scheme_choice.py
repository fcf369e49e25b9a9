"""`sequence.scheme=auto`: what is chosen, for which devices and data, and what of it was measured."""

import dataclasses
import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from small_run import TINY, run

from benchmarks.comparisons import sequence_auto
from benchmarks.sequence.calls import segment_ids
from ejdist.documents import Documents
from ejdist.experts.choice import links_of
from ejdist.mesh import make_mesh
from ejdist.models.lora import build
from ejdist.planning.search import Predictor, as_given
from ejdist.planning.step_time import KEYS
from ejdist.planning.targets import target_of
from ejdist.sequence.cost import AttentionShape
from ejdist.sequence.gathered import groups_of
from ejdist.sequence.scheme import WAITED
from ejdist.sequence.schemes import SCHEMES, AllGather, Halo, Ring, Ulysses
from ejdist.training import attending, choices
from ejdist.training.choices import choose_pair, resolve
from ejdist.training.curriculum import stages_of
from recipes.schema import compose

# How much longer than the best of a shape what auto takes lasts, where that is more than a twentieth: a ring of two H200s took
# 8.355 ms there, and gathered keys 7.953.
MOST = {("NVIDIA H200", 2, 8192, "long_tail"): 1.051}
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "sequences"
IN_GROUPS = "2026-11-29"  # rows of an all-gather from before have keys at once
GATHERED = AttentionShape((("sp", 4),), 3, *(2**20,) * 5, 32, 8, 2, tiles=1024)
PACKED = "sequence.scheme=auto model=8b model.num_layers=1 data.global_batch=1 data.sequence_length="


def chosen(words, kind="NVIDIA H200", documents="4096", rows=2, flops=None, **sizes):
    sections = compose(words.split())
    sizes = sizes or {"sp": 4}
    device = SimpleNamespace(device_kind=kind, platform="tpu" if kind.startswith("TPU") else "gpu")
    mesh = SimpleNamespace(shape=sizes, devices=np.array([device]))
    ids = np.stack([segment_ids(documents, sections.data.sequence_length, seed) for seed in range(rows)])
    model = build(sections.model, sections.lora) if flops is None else SimpleNamespace(flops=flops)
    return choose_pair(sections, mesh, model, ids)


def measured(name, scheme, ranks=4):
    """Returns of a scheme (milliseconds of forward and backward, those of the exchange alone, those waited for, tokens)."""
    rows = json.loads((RESULTS / f"{ranks}xh200_{name}.json").read_text())["rows"].values()
    rows = [row for row in rows if row.get("scheme") == scheme]
    split = [row for row in rows if row["kind"] == "split"]
    alone = [row for row in rows if row["kind"] == "exchange"]
    assert len(split) == len(alone) == 2
    sums = (sum(row["whole_ms"][1] for row in some) for some in (split, alone))
    return *sums, sum(row["exposed_ms"] for row in split), ranks * split[0]["tokens"]


@pytest.mark.parametrize("size", ["8k", "32k"])
def test_what_four_h200s_took(size):
    """Of two schemes what was faster by more than a fiftieth is expected to be; each takes what is expected of it, within a
    fifth: what short documents leave idle at the end of a launch is in no prediction. So are the shares of exchanges
    that are waited for."""
    rows = {"ring": measured(f"packed_{size}", "ring"), "ulysses": measured(f"ulysses_{size}", "ulysses")}
    tokens = rows["ring"][3]
    expected = {name: 1e3 * alone(name, tokens, "zigzag" if name == "ulysses" else "striped") for name in rows}
    for name, (took, exchange, waited, _) in rows.items():
        assert expected[name] == pytest.approx(took, rel=0.21 if size == "8k" else 0.07), name
        assert waited / exchange == pytest.approx(WAITED[name == "ring"], abs=0.12)
    took = {name: row[0] for name, row in rows.items()}
    faster, slower = sorted(took, key=took.get)
    assert took[slower] < 1.02 * took[faster] or expected[faster] < expected[slower]


@pytest.mark.parametrize(("documents", "order"), [("one", "zigzag"), ("long_tail", "striped")])
def test_what_one_document_and_long_ones_took(documents, order):
    took, *_, tokens = measured("one_32k" if documents == "one" else "tail_32k", "ring")
    assert 1e3 * alone("ring", tokens, order, documents) == pytest.approx(took, rel=0.08)


def test_what_gathered_keys_waited_for_on_two_h200s():
    _, exchange, waits, _ = measured("packed_8k", "all_gather", ranks=2)
    assert waits / exchange == pytest.approx(AllGather(head_groups=2).waited(GATHERED), abs=0.05)


def alone(scheme, tokens, order, documents="4096"):
    """Returns the seconds that are expected of a scheme over four H200s."""
    words = f"{PACKED}{tokens} mesh.sp=4 sequence.order={order}".replace("scheme=auto", f"scheme={scheme}")
    return next(iter(chosen(words, documents=documents, rows=1).seconds.values()))


def recorded(kind, ranks):
    """Returns (tokens, documents) -> (scheme, order) -> milliseconds, forward and backward, of every scheme that was recorded
    on so many devices of a kind with the heads of the 8B model: of all of them, else of the busiest one of eight, with the
    transfers that a rank alone does not make at the rates of links that were measured. A gather from before it came in groups
    of heads waits for what groups wait for, as on two H200s, in the place of what it waited for then."""
    found: dict = {}
    for path in sorted(RESULTS.glob("*.json")):
        file = json.loads(path.read_text())
        for name, row in file["rows"].items() if file["device"] == kind else ():
            alike = "window" not in name and ("32/8 x 128" in name or "/" not in name)
            if row["kind"] not in ("split", "rank") or row.get("ranks", file["ranks"]) != ranks or not alike:
                continue
            if (scheme := row["scheme"]) is None or not _in_default_groups(file["options"], row, ranks):
                continue
            of = {n: row.get(n) for n in ("scheme", "order", "tokens", "documents", "direction")}
            ms = row["whole_ms"][1]
            if (scheme, row["kind"]) == ("all_gather", "split") and file["date"] < IN_GROUPS and "exposed_ms" in row:
                (sent,) = [r for r in file["rows"].values() if r["kind"] == "exchange" and of.items() <= r.items()]
                shape = dataclasses.replace(GATHERED, over=(("sp", ranks),), tiles=row["tokens"] // 128)
                ms += AllGather().waited(shape) * sent["whole_ms"][1] - row["exposed_ms"]
            if row["kind"] == "rank" and row["direction"] == "backward":
                ms += 1e3 * waits(of, kind, ranks)
            documents = "one" if of["documents"] in (None, "none") else of["documents"]
            sums = found.setdefault((row["tokens"], documents), {})
            sums.setdefault((scheme, row["order"]), {})[row["direction"]] = ms
    whole = {
        shape: {pair: ms for pair, parts in of.items() if (ms := _both(parts)) is not None}
        for shape, of in found.items()
    }
    return {shape: of for shape, of in whole.items() if len({scheme for scheme, _ in of}) > 1}


def _in_default_groups(options, row, ranks):
    """Returns whether the keys of a rank came in as many groups of heads as they would today without `head_groups`."""
    asked = options.get("head_groups") if row["kind"] == "rank" else None
    return not asked or asked == groups_of(row["tokens"] // 128, ranks, 32, 8, row["direction"] == "forward")


def _both(parts):
    """Returns the time of both directions: their sum, or what was recorded of both together; None where one is missing."""
    apart = [parts[way] for way in ("forward", "backward") if way in parts]
    return sum(apart) if len(apart) == 2 else parts.get("both")


def waits(of, kind, ranks):
    """Returns the seconds that a rank waits for transfers."""
    words = f"{PACKED}{ranks * of['tokens']} mesh.sp={ranks} sequence.order={of['order']}"
    sections = compose(words.replace("scheme=auto", f"scheme={of['scheme']}").split())
    device = SimpleNamespace(device_kind=kind, platform="gpu")
    mesh = SimpleNamespace(shape={"sp": ranks}, devices=np.array([device]))
    order = sections.sequence.over(ranks, sections.data.sequence_length, "gpu")
    seconds = functools.partial(attending.alone_seconds, sizes=mesh.shape, links=links_of(kind))
    return attending.waited(sections.model, attending.share_of(sections, mesh, order), math.inf, seconds, 1)


@pytest.mark.parametrize(
    ("kind", "ranks", "count"),
    [("NVIDIA H200", 2, 5), ("NVIDIA H200", 4, 2), ("NVIDIA H200", 8, 2), ("NVIDIA H100 80GB HBM3", 4, 1)],
)
def test_what_auto_takes_is_within_a_twentieth_of_the_best_that_was_recorded(kind, ranks, count):
    """Of the schemes and orders that were recorded at a shape."""
    shapes = recorded(kind, ranks)
    assert len(shapes) >= count
    for (tokens, documents), took in shapes.items():
        words = f"{PACKED}{ranks * tokens} mesh.sp={ranks} sequence.order="
        expected = {}
        for scheme, order in sorted(took, key=lambda pair: [*SCHEMES].index(pair[0])):
            one = (words + order).replace("scheme=auto", f"scheme={scheme}")
            expected |= chosen(one, kind, documents, rows=1, sp=ranks).seconds
        pick, *_ = attending.ranked_pairs(expected, dict.fromkeys(expected, 1))
        assert took[pick] <= MOST.get((kind, ranks, tokens, documents), 1.05) * min(took.values()), (
            tokens,
            documents,
            pick,
            took,
            expected,
        )


def test_keys_in_groups_of_heads_wait_for_the_first():
    """On Hopper gathers run beside attention but those of the first group; with more tokens there are more groups. Elsewhere
    keys come at once."""
    many, scheme = GATHERED, AllGather()
    few, none = (dataclasses.replace(many, tiles=tiles) for tiles in (1, 0))
    assert WAITED[False] == scheme.waited(few) == pytest.approx(scheme.waited(none))
    # Four groups forward and eight backward, whose keys and gradients are twice as many bytes; as often as attention runs.
    for forwards, of_four in ((1, 1 / 3), (2, 1 / 2)):
        waits = scheme.waited(dataclasses.replace(many, forwards=forwards))
        assert waits == pytest.approx(0.6 * (of_four / 4 + (1 - of_four) / 8))
    # Groups of a forward have eight heads of queries at least: here it has one, and the backward still eight.
    one = dataclasses.replace(many, heads=8)
    assert scheme.waited(one) == pytest.approx(WAITED[False] / 3 + 0.6 / 8 * 2 / 3)
    assert AllGather(head_groups=2).waited(many) == pytest.approx(0.3)
    sent = {name: sum(scheme.cost(shape).bytes.values()) for name, shape in (("in groups", many), ("at once", none))}
    assert sent == {"in groups": 3 * 3 * 2**21, "at once": 3 * (2 + 2) * 2**21}, "gradients in the dtype of the keys"
    assert scheme.cost(many).calls == {("sp", "all_gather"): 4 + 2, ("sp", "all_to_all"): 8}
    assert scheme.passes(many) < scheme.passes(none) and Ring().passes(many) > 0 == Ring().passes(
        dataclasses.replace(many, hops=0)
    )


@pytest.mark.parametrize(
    ("words", "kind", "tiles"),
    [
        ("", "NVIDIA H200", 128),
        ("", "NVIDIA A100-SXM4-80GB", 0),
        ("", "TPU v5", 0),
        ("model.head_dim=96", "NVIDIA H200", 0),
        ("sequence.order=striped sequence.stripe=64", "NVIDIA H200", 0),
        ("model.compute_dtype=float32", "NVIDIA H200", 0),
    ],
)
def test_what_comes_in_groups_of_heads(monkeypatch, words, kind, tiles):
    """Plans ask as calls do, see test_ring_in_place.py."""
    words, seen = f"{PACKED}131072 mesh.sp=8 {words}".replace("scheme=auto", "scheme=all_gather"), []
    monkeypatch.setattr(AllGather, "waited", lambda self, shape: seen.append(shape.tiles) or 1.0)
    chosen(words, kind, rows=1, sp=8)
    assert {*seen} == {tiles}


def test_what_decides():
    """Heads that share no keys send as much of keys as of queries in a ring, and longer rows hide it under their attention."""
    many = "model.num_kv_heads=32"
    short = chosen(f"{PACKED}32768 mesh.sp=4 {many}").of_schemes()
    long = chosen(f"{PACKED}1048576 mesh.sp=4 {many}", documents="one", rows=1).of_schemes()
    assert 1.3 * short["ulysses"] < short["ring"] and long["ring"] < 1.01 * long["ulysses"]
    assert (
        "ulysses" not in chosen(f"{PACKED}32768 mesh.sp=4 {many} model.num_heads=33 model.num_kv_heads=33").of_schemes()
    )
    for kind in ("TPU v5p", "TPU v6 lite"):
        assert set(chosen(f"{PACKED}32768 mesh.sp=4", kind).of_schemes()) >= {"ring", "ulysses"}


def test_a_ring_over_hosts_takes_the_time_of_the_network():
    """Sixteen GPUs are two hosts, over which heads that share no keys take longer than on one."""
    near, far = (
        chosen(f"{PACKED}131072 model.num_kv_heads=32 mesh.sp={n}", documents="one", rows=1, sp=n).of_schemes()["ring"]
        for n in (8, 16)
    )
    assert far > near


def test_heads_of_a_device_are_those_of_a_smaller_model():
    """What is summed over tp is not of the sequence."""
    split = chosen(f"{PACKED}32768 mesh.sp=4 mesh.tp=2", sp=4, tp=2).of_schemes()
    whole = chosen(f"{PACKED}32768 mesh.sp=4 model.num_heads=16 model.num_kv_heads=4").of_schemes()
    assert split == pytest.approx(whole, rel=1e-9)


def test_accumulation_sends_as_often_and_recomputed_attention_works_more():
    of = f"{PACKED}32768 mesh.sp=4"
    one, twice = (
        chosen(of.replace("global_batch=1", "global_batch=2") + f" accumulation={n}").of_schemes()["ulysses"]
        for n in (1, 2)
    )
    assert one < twice == pytest.approx(one, rel=0.02), "the same rows, in twice as many messages"
    kept, again = (chosen(f"{of} model.remat={name}").of_schemes()["ring"] for name in ("attention", "full"))
    assert 1.2 < again / kept < 4.5 / 3.5 + 0.1


def test_what_holds_much_more_is_not_taken():
    assert "all_gather" in chosen(f"{PACKED}32768 mesh.sp=4").of_schemes()
    assert "all_gather" not in chosen(f"{PACKED}131072 mesh.sp=32", sp=32).of_schemes()


def test_a_model_without_attention_has_the_first_scheme(monkeypatch):
    monkeypatch.setattr(attending, "counted_parts", lambda c: {})
    assert chosen(f"{PACKED}32768 mesh.sp=4", flops=[]).scheme == "ring"


def test_gradients_of_windows_travel_as_those_of_other_layers():
    words = "sequence.gradients=bfloat16 sequence.window_scheme="
    for name, window in (("ring", Ring("bfloat16")), ("halo", Halo())):
        section = compose([*TINY, *f"{words}{name}".split()]).sequence
        assert (section.made().full, section.made().window) == (Ring("bfloat16"), window)
    with pytest.raises(ValueError, match="'gradients' = 'float16' is unknown; use one of float32, bfloat16"):
        Ring("float16")
    with pytest.raises(ValueError, match=r"sequence\.gradients = 'bfloat16' is no option of the scheme 'ulysses'"):
        compose([*TINY, "sequence.scheme=ulysses", "sequence.gradients=bfloat16"]).sequence.validate()


def test_without_rates_it_is_a_ring():
    choice = chosen(f"{PACKED}32768 mesh.sp=4", kind="cpu")
    assert choice.scheme == "ring" and not choice.seconds and "no rates of cpu are known" in choice.describe()


def test_it_says_what_it_expects():
    choice = chosen(f"{PACKED}32768 mesh.sp=4")
    said, ((scheme, order), (second, lies), *_) = choice.describe(), choice.seconds
    assert (scheme, order) == (choice.scheme, choice.order.order.name)
    assert said.startswith(f"sequence.scheme = auto is {scheme} in {order} order, ") and "NVIDIA H200 (measured" in said
    assert f"; second is {second} in {lies} order, {1e3 * choice.seconds[second, lies]:,.3g}; each" in said
    assert all(f"{name} {1e3 * value:,.3g}" in said for name, value in choice.of_schemes().items())
    assert f"sequence.scheme={scheme} sequence.order={order} keeps it" in said


def test_what_is_pinned_stays():
    choice = chosen(f"{PACKED}32768 mesh.sp=4 sequence.order=zigzag")
    assert choice.order.order.name == "zigzag" and {order for _, order in choice.seconds} == {"zigzag"}
    choice = chosen(f"{PACKED}32768 mesh.sp=4 sequence.scheme=group_cast")
    assert choice.scheme == "group_cast" and {scheme for scheme, _ in choice.seconds} == {"group_cast"}


@pytest.mark.slow
def test_a_scheme_and_an_order_are_weighed_together():
    """Over 64 ranks the most even order sends all keys around the ring, and the least even one those of a few hops: it is the
    fastest by far. Ulysses is even in any."""
    choice = chosen(f"{PACKED}1048576 mesh.sp=64", rows=1, sp=64)
    even = choice.order.uneven
    assert (choice.scheme, choice.order.order.name) == ("ring", "contiguous") and even["contiguous"] > 2 * even[
        "balanced"
    ]
    assert choice.seconds["ring", "contiguous"] < choice.seconds["ring", "balanced"] / 5
    seconds = chosen(f"{PACKED}65536 mesh.sp=8", rows=1, sp=8).seconds
    assert len({value for (scheme, _), value in seconds.items() if scheme == "ulysses"}) == 1
    assert seconds["ring", "zigzag"] > 1.2 * seconds["ring", "balanced"]


H200, V5P = (None, 8, "h200", None), ("v5p:2x2x2", None, None, None)


@pytest.mark.parametrize(("kind", "target"), [("NVIDIA H200", H200), ("TPU v5", V5P)])
@pytest.mark.parametrize(
    ("length", "documents"), [(16384, "one"), (65536, "long_tail"), (65536, "1024"), (131072, "4096")]
)
def test_a_plan_has_the_pair_of_the_run(length, documents, kind, target):
    """A recipe that leaves both open is planned with what its run takes. Rows of a plan are cut anew of the same documents, so
    that of pairs that are as fast another one may be taken."""
    words = f"{PACKED}{length} mesh.sp=8 mesh.fsdp=1"
    choice = chosen(words, kind, documents, sp=8)
    ids = np.stack([segment_ids(documents, length, seed) for seed in range(2)])
    predictor = Predictor(compose(words.split()), target_of(*target), None, Documents.of(ids))
    plan = as_given(predictor)
    expected = choice.seconds[plan.scheme, plan.order]
    assert expected <= 1.05 * min(choice.seconds.values()), choice.describe()
    if documents == "one":
        assert (plan.scheme, plan.order) == (choice.scheme, choice.order.order.name)
        assert predictor.checked(plan).time.attending == pytest.approx(expected, rel=1e-6)


def test_what_a_split_sequence_sends_is_counted_once():
    """What else is sent in a step is the same for schemes that send as much of it, and has no keys in it."""
    words = f"{PACKED}65536 mesh.sp=8 mesh.fsdp=1 sequence.order=zigzag sequence.scheme="
    times = [Predictor(compose((words + n).split()), target_of(*H200)) for n in ("ring", "ulysses")]
    ring, ulysses = (one.checked(as_given(one)).time.seconds for one in times)
    assert ring["collectives, exposed"] == ulysses["collectives, exposed"] > 0 and ring[KEYS] != ulysses[KEYS]


@pytest.mark.slow
def test_no_pinned_choice_is_expected_to_be_faster():
    """Than what auto takes, by 5%; `python -m benchmarks.comparisons.sequence_auto` prints it for rows of three kinds."""
    rows = list(sequence_auto.rows((2048,), ("4096", "long_tail"), ("NVIDIA H200",)))
    assert len(rows) == 2 and all(row.over <= 1.05 and len(row.pinned) > 6 for row in rows)


class Rows:
    """Stands for `Data`."""

    def __init__(self):
        self.global_batch, self.begin = 1, SimpleNamespace(batch=0)

    def resized(self, **sizes):
        return self

    def batch(self, step, rows):
        return {"segment_ids": segment_ids("300", 4096, step)[None]}


def test_a_run_has_the_program_of_its_scheme(monkeypatch):
    """Only what was left open changes, and the program is made anew where the scheme or the order is another."""
    recipe = compose([*TINY, "mesh.sp=4", "data.sequence_length=4096", "data.global_batch=1", "sequence.scheme=auto"])
    recipe.sequence.order = "zigzag"
    (stage,) = stages_of(recipe)
    mesh = make_mesh(**vars(recipe.mesh))
    program = SimpleNamespace(
        mesh=mesh, model=build(recipe.model, recipe.lora), order=recipe.sequence.over(4, 4096, "cpu")
    )
    said = []
    (new,), (of_new,) = resolve([stage], [program], [Rows()], lambda one: "made", said.append)
    assert new.sections.sequence.scheme == "ring" and of_new is program and len(said) == 1
    found = choose_pair(recipe, mesh, program.model, Rows().batch(0, None)["segment_ids"])
    monkeypatch.setattr(choices, "choose_pair", lambda *a: dataclasses.replace(found, scheme="ulysses"))
    (new,), (of_new,) = resolve([stage], [program], [Rows()], lambda one: "made", said.append)
    assert new.sections.sequence == dataclasses.replace(recipe.sequence, scheme="ulysses") and of_new == "made"
    assert isinstance(new.sections.sequence.made().full, Ulysses)


@pytest.mark.parametrize("option", ["head_groups=2", "outer=ring", "gradients=bfloat16"])
def test_options_are_of_a_scheme_that_is_named(option):
    name = option.partition("=")[0]
    with pytest.raises(ValueError, match=rf"with sequence\.{name}, which is an option of some schemes"):
        compose([*TINY, "sequence.scheme=auto", f"sequence.{option}"]).sequence.validate()


@pytest.mark.slow  # a run, 7 s
def test_a_run_says_which_it_is(tmp_path):
    said = run(tmp_path / "run", "mesh.sp=2", "sequence.scheme=auto", "run.steps=2")[1]
    assert "sequence.scheme = auto is ring: no rates of cpu are known" in said and "tokens per step, ring in" in said
