"""Which transfers of a split sequence hide under attention, by the schedules that the compilers of TPUs and GPUs make of it."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_names import without_code
from schedules import transfers

from benchmarks.comparisons import sequence_memory
from ejdist import Order, make_mesh, ring_attention
from ejdist.planning.targets import NoCompiler, target_of
from ejdist.sequence import AllGather, GroupCast, Ring, compiler_options, exchange
from ejdist.sequence.group_cast import capacity
from ejdist.sequence.schedule import chunk_of
from ejdist.training import program
from recipes.schema import compose

RANKS, TOKENS, HEADS, WIDTH = 4, 2048, 8, 128
LARGE = 2**20
# The quick rows, and tokens of a rank in them: transfers are as large as they must be, and compiling takes half of the time.
QUICK = {("packed", "zigzag", True): 512, ("window", "zigzag", True): 512}
KEYS = 2 * TOKENS * HEADS * WIDTH * 2  # bytes of a rank's keys and values
TARGETS = {"v5p": ("v5p:2x2x1", None, None, None), "h200": (None, RANKS, "h200", None)}
# With a window, somewhat more than the tokens of a rank, or without; with segment ids or without.
MASKS = {
    "plain": (False, False),
    "packed": (False, True),
    "window": (True, False),
    "packed_window": (True, True),
}


@functools.cache
def scheduled(target, mask, order, gradient, scheme="ring", directions="auto", tokens=TOKENS):
    """Returns the compiled text of attention over four devices, with its gradient or without."""
    windowed, packed = MASKS[mask]
    window = tokens + 100 if windowed else None
    made = target_of(*TARGETS[target])
    try:
        mesh = make_mesh(sp=RANKS, devices=made.devices())
    except NoCompiler as error:
        pytest.skip(str(error))
    along = NamedSharding(mesh, P(None, "sp"))

    def attend(q, k, v, ids):
        options = {"q_segment_ids": ids, "kv_segment_ids": ids} if packed else {}
        # Rows of a test are shorter than those whose hops documents say by default.
        if scheme == "ring":
            ring = Ring(hops="batch") if by_documents(mask, order) else Ring(directions=directions)
        else:
            ring = scheme
        how = {"mesh": mesh, "order": order, "scheme": ring, "sliding_window": window}
        return ring_attention(q, k, v, causal=True, **how, **options)

    def run(q, k, v, ids):
        if not gradient:
            return attend(q, k, v, ids)
        out, pull = jax.vjp(lambda *a: attend(*a, ids), q, k, v)
        return out, pull(out)

    x = jax.ShapeDtypeStruct((1, RANKS * tokens, HEADS, WIDTH), jnp.bfloat16, sharding=along)
    ids = jax.ShapeDtypeStruct(x.shape[:2], jnp.int32, sharding=along)
    # A schedule does not depend on what kernels are like inside.
    with made.lowering(), without_code():
        lowered = jax.jit(run, compiler_options=compiler_options(mesh)).lower(x, x, x, ids)
    return lowered.compile().as_text()


def by_documents(mask, order):
    """Whether the hops of a ring are those that documents need."""
    return MASKS[mask][1] and order == "contiguous"


def rows():
    for target in TARGETS:
        for mask in MASKS:
            for order in ("zigzag", "contiguous"):
                for gradient in (True, False):
                    marks = () if (mask, order, gradient) in QUICK else pytest.mark.slow
                    yield pytest.param(target, mask, order, gradient, marks=marks)


@pytest.mark.parametrize(("target", "mask", "order", "gradient"), list(rows()))
def test_every_transfer_of_keys_runs_beside_attention(target, mask, order, gradient):
    """Forward and backward; but gradients on their way home, when all is attended to, run beside what comes after."""
    check_hidden(target, mask, order, gradient, tokens=QUICK.get((mask, order, gradient), TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["plain", "packed"])
def test_so_it_does_in_one_direction_of_a_torus(mask):
    check_hidden("v5p", mask, "zigzag", True, 1)


def check_hidden(target, mask, order, gradient, directions="auto", tokens=TOKENS):
    text = scheduled(target, mask, order, gradient, directions=directions, tokens=tokens)
    keys = KEYS * tokens // TOKENS
    ways = {re.sub(r"\s", "", pairs) for pairs in re.findall(r"source_target_pairs=\{(\{.*?\})\}", text)}
    if not MASKS[mask][0]:  # hops of a window go from each half of a zigzag to the other
        both = directions == 2 or (target, directions, by_documents(mask, order)) == ("v5p", "auto", False)
        assert by_documents(mask, order) or len(ways) == (2 if both else 1), ways
    large = transfers(text, LARGE)
    assert {t.kind for t in large} == {"collective-permute"}
    # One program, or a branch for each number of hops after which gradients go home, of which one is taken.
    alone = [[t for t in large if not t.beside and t.computation == name] for name in {t.computation for t in large}]
    alone = [branch for branch in alone if branch]
    assert len(alone) <= ((RANKS - 1 if by_documents(mask, order) else 1) if gradient else 0), alone
    assert all(sum(t.bytes for t in branch) <= keys for branch in alone), alone
    together = [t for t in large if t.beside]
    if target == "h200":  # which has one on its way at a time: keys and values, and their gradients, are one
        # Of the first keys of the backward one array may have come in the forward, and is not sent again in one program.
        once = [t for t in together if t.bytes != keys // 2]
        assert all(t.bytes in (keys, 2 * keys, 3 * keys) for t in once) and len(together) - len(once) <= gradient, large
        assert all(len(branch) == 1 for branch in alone), large
    assert together and all(t.bytes <= 3 * keys for t in together)


@pytest.mark.slow
@pytest.mark.parametrize("target", [*TARGETS])
@pytest.mark.parametrize("mask", [*MASKS])
@pytest.mark.parametrize("gradient", [True, False])
def test_chunks_of_a_group_cast_come_beside_attention(target, mask, gradient):
    """But gradients of the last pass, on their way home when all is attended to: in each branch, of one pass or of several. A
    GPU has all of a pass in one transfer, with the gradients of the one before."""
    large = transfers(scheduled(target, mask, "zigzag", gradient, GroupCast(1)), LARGE)
    room = capacity(1, RANKS, chunks := TOKENS // chunk_of(Order("zigzag", RANKS), TOKENS))
    pairs, slots = (RANKS - 1, 1) if target == "v5p" else (1, RANKS)  # of one transfer
    each = slots * room * KEYS // chunks
    assert {t.kind for t in large} == {"collective-permute" if target == "v5p" else "all-to-all"}
    alone = [[t for t in large if not t.beside and t.computation == name] for name in {t.computation for t in large}]
    alone = [branch for branch in alone if branch]
    assert len(alone) <= (2 if MASKS[mask][1] else 1) * gradient, alone
    assert all([t.bytes for t in branch] == [each] * pairs for branch in alone), alone
    assert {t.bytes for t in large if t.beside} <= {each, 2 * each} and any(t.beside for t in large)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [2, 4])
def test_keys_that_are_gathered_in_groups_of_heads_come_beside_attention(groups):
    """On GPUs, but the first group; in the backward all others come beside the first, and the gradients of a group go back
    beside those of the next, but the last ones. Together, the backward has the first keys of the forward."""
    large = transfers(scheduled("h200", "packed", "zigzag", True, AllGather(head_groups=groups)), LARGE)
    ways = {kind: [t for t in large if t.kind == kind] for kind in ("all-gather", "all-to-all")}
    came, back = ways.values()
    assert len(came) == groups + 1 and len(back) == groups and len(large) == 2 * groups + 1, large
    assert [bool(t.beside) for t in came] == [False, *[True] * groups], came
    assert [bool(t.beside) for t in back] == [*[True] * (groups - 1), False], back
    each = (RANKS + 1) * KEYS // 2 // groups  # a start of a gather has its keys beside those of all
    assert [t.bytes for t in came] == [*[each] * groups, each * (groups - 1)], came
    assert {t.bytes for t in back} == {RANKS * KEYS // groups}, back


@pytest.mark.parametrize("target", [*TARGETS])
@pytest.mark.slow
def test_of_a_halo_no_transfer_is_larger_than_the_window(target):
    """Heads of GPT-OSS at 131,072 tokens over eight devices: a window of 128."""
    window, tokens, keys = 128, 131072, 8 * 64 * 2
    made = target_of("v5p:2x2x2", None, None, None) if target == "v5p" else target_of(None, 8, target, None)
    mesh = make_mesh(sp=8, devices=made.devices())
    along = NamedSharding(mesh, P(None, "sp"))
    q, k = (jax.ShapeDtypeStruct((1, tokens, heads, 64), jnp.bfloat16, sharding=along) for heads in (64, 8))
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32, sharding=along)

    def run(q, k, v, ids):
        how = {"mesh": mesh, "order": "zigzag", "scheme": "halo", "sliding_window": window, "causal": True}
        return ring_attention(q, k, v, q_segment_ids=ids, kv_segment_ids=ids, **how)

    with made.lowering():
        lowered = jax.jit(run, compiler_options=compiler_options(mesh)).lower(q, k, k, ids)
    found = transfers(lowered.compile().as_text())
    permutes = [t.bytes for t in found if t.kind == "collective-permute"]
    assert permutes and max(permutes) <= 2 * window * keys, permutes
    assert sum(t.bytes for t in found) <= 1.1 * 2**20, found


@pytest.mark.slow
@pytest.mark.parametrize("target", [*TARGETS])
def test_keys_of_a_ring_of_two_levels_travel_beside_attention(target):
    """Inside of two groups of four devices, and between them."""
    made = target_of("v5p:2x2x2", None, None, None) if target == "v5p" else target_of(None, 8, target, None)
    try:
        mesh = make_mesh(cp=2, sp=4, devices=made.devices())
    except NoCompiler as error:
        pytest.skip(str(error))
    along = NamedSharding(mesh, P(None, ("cp", "sp")))
    x = jax.ShapeDtypeStruct((1, 8 * TOKENS, HEADS, WIDTH), jnp.bfloat16, sharding=along)
    ids = jax.ShapeDtypeStruct(x.shape[:2], jnp.int32, sharding=along)

    def run(q, k, v, ids):
        how = {"mesh": mesh, "order": "zigzag", "scheme": Ring(levels=2), "causal": True}
        return ring_attention(q, k, v, axis_name=("cp", "sp"), q_segment_ids=ids, kv_segment_ids=ids, **how)

    with made.lowering():
        lowered = jax.jit(run, compiler_options=compiler_options(mesh)).lower(x, x, x, ids)
    large = transfers(lowered.compile().as_text(), LARGE)
    assert large and all(t.kind == "collective-permute" and t.beside for t in large), large
    assert {t.bytes for t in large} == {KEYS if target == "h200" else KEYS // 2}, large


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "passes"), [*sequence_memory.LIMITS])
def test_temporaries_of_a_long_sequence_are_no_more_than_is_asked(scheme, passes):
    """131,072 tokens over eight chips of v5p."""
    try:
        held = sequence_memory.compiled(scheme(), passes).memory_analysis().temp_size_in_bytes / 2**20
    except NoCompiler as error:
        pytest.skip(str(error))
    assert held <= sequence_memory.LIMITS[scheme, passes]


def test_a_step_is_compiled_with_the_options(monkeypatch):
    """Of a mesh that splits the sequence: one that no compiler knows is refused."""
    monkeypatch.setattr(exchange, "compiler_options", lambda mesh: {"xla_hops_of_a_ring": 1})
    words = ["recipe=long_context", "model.num_layers=1", "mesh.fsdp=1", "mesh.sp=2"]
    sections = compose([*words, "data.sequence_length=64", "data.global_batch=1"])
    made = program.make_program(sections, make_mesh(sp=2))
    with pytest.raises(Exception, match="xla_hops_of_a_ring"):
        made.lower().compile()
    monkeypatch.undo()
    assert compiler_options(make_mesh(sp=2)) == {}, "on CPUs nothing is asked for"


@pytest.mark.slow
def test_segment_ids_are_gathered_once_a_step():
    """The loop over layers has no gather of theirs: it is the same in every layer, and stands before the loop."""
    words = ["recipe=long_context", "model.num_layers=4", "model.model_dim=64", "model.ffn_dim=64", "mesh.fsdp=1"]
    sections = compose([*words, "mesh.sp=4", "data.sequence_length=256", "data.global_batch=1"])
    text = program.make_program(sections, make_mesh(sp=4)).lower().compile().as_text()
    main = text[text.index("\nENTRY ") :]
    gathers = re.compile(r"= s32\[1,256\]\S* all-gather\(")
    assert len(gathers.findall(text)) == len(gathers.findall(main)) == 1


@pytest.mark.slow
def test_what_layers_keep_of_attention_is_laid_out_once():
    """An exchange of heads has them as the major dim; what all layers keep is not copied into that layout as a whole."""
    layers, tokens, heads, width = 4, 256, 8, 64
    made = target_of(*TARGETS["h200"])
    words = ["recipe=long_context", "model=qwen3_8b", f"model.num_layers={layers}", "model.model_dim=128"]
    words += ["model.ffn_dim=128", "model.vocab_size=512", f"model.num_heads={heads}", f"model.num_kv_heads={heads}"]
    words += [f"model.head_dim={width}", "model.remat=attention", "sequence.scheme=ulysses", "mesh.fsdp=1"]
    words += [f"mesh.sp={RANKS}", f"data.sequence_length={RANKS * tokens}", "data.global_batch=1"]
    try:
        mesh = make_mesh(sp=RANKS, devices=made.devices())
    except NoCompiler as error:
        pytest.skip(str(error))
    with made.lowering(), without_code():
        lowered = program.make_program(compose(words), mesh).lower()
    text = lowered.compile().as_text()
    assert f"bf16[{layers},1,{tokens},{heads * width}]" in text and f"bf16[{heads},{layers},1,{tokens}," not in text
