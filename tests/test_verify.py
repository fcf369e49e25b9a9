"""`sequence.verify=first_batch`: a narrow twin of a model by the plan of the sequence and on one device, and how the place of a
difference is named. That it sees faults of plans: tests/faults/verify.py."""

import types

import jax
import numpy as np
import pytest
from small_run import TINY

from ejdist import make_mesh
from ejdist.documents import places
from ejdist.order import Order
from ejdist.training import steps, verify
from ejdist.training.program import make_program
from ejdist.training.verify import Twin, check_plan, described, difference
from recipes.schema import compose

T = 64


def row_of(seed=0):
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(0, 3, (1, T)), 1).astype(np.int32)
    ids[:, T - 4 :] = -1
    tokens = rng.integers(0, 200, (1, T)).astype(np.int32)
    targets = np.where(np.diff(ids, axis=1, append=-1) == 0, np.roll(tokens, -1, 1), -1)
    row = {"tokens": tokens, "targets": targets, "positions": places(ids), "segment_ids": ids}
    return {n: x.astype(np.int32) for n, x in row.items()}


def program_of(*words, devices=4):
    s = compose([*TINY, "sequence.verify=first_batch", *words])
    return s, make_program(s, make_mesh(**vars(s.mesh), devices=jax.devices()[:devices]))


# What a plan can do: a ring and halos with sinks in a zigzag; Ulysses inside of a ring, of balanced rows; chunks
# of such; latents.
PLANS = {
    "halo": (
        *("mesh.fsdp=2", "model.num_layers=3", "model.layer_pattern=[window,full]", "model.sliding_window=9"),
        *("model.attention_sinks=true", "model.attention_soft_cap=3.0"),
    ),
    "ulysses": ("mesh.cp=2", "sequence.scheme=ulysses", "sequence.order=balanced", "sequence.stripe=8"),
    "group_cast": ("sequence.scheme=group_cast", "sequence.buffer=0.5", "sequence.order=balanced", "sequence.stripe=4"),
    "latents": (
        *(
            "model.layer_pattern=[latent]",
            "model.qk_norm=false",
            "model.latent.kv_rank=16",
            "model.latent.nope_dim=8",
            "mesh.tp=2",
        ),
        *("model.latent.rope_dim=4", "model.latent.value_dim=8", "sequence.order=striped", "sequence.stripe=4"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_plans_are_those_of_one_device(name):
    assert difference(*program_of(*PLANS[name]), row_of()) is None


# -- what is compared --------------------------------------------------------------------------------------------------


def test_a_twin_has_every_mixer_once_with_its_widths():
    """And as many heads as the mesh needs, no experts, and latents that travel where those of the whole model do."""
    s = compose(["model=gpt_oss_20b", "mesh.fsdp=2", "mesh.sp=2", "mesh.tp=2"])
    twin = Twin.of(s, make_mesh(fsdp=2, sp=2, tp=2))
    c, narrow = s.model, twin.sections.model
    assert [mixer for mixer, _ in twin.layers] == ["window", "full"] and narrow.num_layers == 2
    assert [numbers[:2] for _, numbers in twin.layers] == [[0, 2], [1, 3]]
    assert (narrow.num_heads, narrow.num_kv_heads) == (c.num_heads * 2 // c.num_kv_heads, 2)
    kept = ("head_dim", "sliding_window", "attention_sinks", "rope_scaling", "rope_factor", "compute_dtype")
    assert all(getattr(narrow, name) == getattr(c, name) for name in kept)
    assert twin.sections.data.global_batch == 2 and narrow.part_names() == {"attention", "window_attention"}
    assert all(np.any(x) and x.dtype == np.float32 for x in jax.tree.leaves(twin.parameters()))
    for more, latents in (((), "always"), (("lora.rank=4",), "never")):
        s = compose(["model=deepseek_v3", "mesh.sp=8", *more])
        twin = Twin.of(s, make_mesh(sp=8))
        assert twin.sections.sequence.latents == latents and twin.layers == [("latent", [*range(61)])]


def test_what_cannot_be_compared_is_refused():
    s, mesh = compose(TINY), make_mesh(sp=2, devices=jax.devices()[:2])
    s.model.layer_pattern = ("none+mlp",)
    with pytest.raises(ValueError, match=r"sequence.verify compares layers that mix tokens.*null"):
        Twin.of(s, mesh)
    s.model = types.SimpleNamespace()
    with pytest.raises(
        ValueError, match=r"layers of a decoder, and model is a SimpleNamespace: use sequence.verify=null"
    ):
        Twin.of(s, mesh)
    with pytest.raises(ValueError, match=r"sequence.verify = 'all' is unknown; use first_batch, or null"):
        compose([*TINY, "sequence.verify=all"]).sequence.validate()


@pytest.mark.parametrize("name", ["zigzag", "balanced"])
def test_errors_are_of_tokens_in_the_order_of_the_text(name):
    """Over a token's size; a small token's over a tenth of the mean, and none of padding."""
    words = ("sequence.stripe=8",) if name == "balanced" else ()
    s, program = program_of("mesh.fsdp=2", f"sequence.order={name}", *words)
    case = verify._Case.of(Twin.of(s, program.mesh), program, row_of())
    want = np.ones((1, T, 4), np.float32)
    want[:, 7] = 1e-6
    got = np.repeat(want, 2, 0)
    got[1, 40] += 0.5
    got[:, 7] += 0.001
    got[:, T - 1] = np.nan
    errors = case.errors(case._on_mesh(want), want)
    assert errors.shape == (2, T) and not errors.any()
    lie = program.order.permute(got, index=case.index)
    errors = case.errors(
        jax.make_array_from_callback(lie.shape, case._on_mesh(want).sharding, lambda at: lie[at]), want
    )
    wrong = np.argwhere(~(errors <= 0.005)).tolist()
    assert wrong == [[0, 7], [1, 7], [1, 40]]
    np.testing.assert_allclose(errors[1, [7, 40]], [0.002 / (0.2 * 59 / 60), 0.5], rtol=1e-4)


# -- what is said ------------------------------------------------------------------------------------------------------


def test_where_a_plan_differs_is_named():
    errors = np.zeros((2, 16))
    errors[1, [2, 3, 14]] = 0.5, np.nan, 0.02
    errors[0, 5] = 0.1
    told = described("the result of layer 4 (window)", errors, Order("zigzag", 4), None, 0.01)
    assert told == (
        "the result of layer 4 (window) differs from one device's by inf of a token's size, over 0.01, on ranks 0, 1, 2 of 4, "
        "in rows 0, 1: on rank 1 at 2 tokens between 2 and 3 of the text"
    )
    index = np.arange(16)[::-1].reshape(1, 16).repeat(2, 0)
    told = described("the loss", errors * (errors < 0.4), Order("balanced", 2, 4), index, 0.01)
    assert "in rows 0, 1: on rank 1 at 1 tokens between 5 and 5" in told


class Alone:
    index = 1

    def first_error(self, moment, message):
        return message


def test_a_run_ends_before_its_first_step_where_the_plan_differs(monkeypatch):
    s, program = program_of()
    lines, read = [], []
    batch = lambda: read.append(1) or row_of()  # noqa: E731
    monkeypatch.setattr(verify, "difference", lambda s, program, row: None)
    check_plan(s, program, Alone(), batch, lines.append)
    assert "losses, results and gradients" in lines[0] and "order zigzag" in lines[0]
    monkeypatch.setattr(verify, "difference", lambda s, program, row: "the loss differs")
    with pytest.raises(
        ValueError, match=r"sequence.scheme=ring, order zigzag, the loss differs. Nothing was trained: try"
    ):
        check_plan(s, program, Alone(), batch, lines.append)
    one = program_of("mesh.sp=1", devices=1)
    check_plan(*one, Alone(), batch, lines.append)
    assert "on one device there is no plan" in lines[1] and len(read) == 2
    s.sequence.verify = None
    check_plan(s, program, Alone(), batch, lines.append)
    assert len(lines) == len(read) == 2


def test_the_first_batch_of_a_stage_is_compared_when_it_is_compiled(monkeypatch):
    s, program = program_of()
    read, quiet = [], types.SimpleNamespace(phase=lambda *a, **more: None)
    monkeypatch.setattr(steps, "_compiled", lambda *a: "compiled")
    monkeypatch.setattr(verify, "difference", lambda s, program, row: row["said"])

    def compiled(said):
        data = types.SimpleNamespace(begin=types.SimpleNamespace(batch=2))
        data.batch = lambda *at: read.append(at) or {"said": said}
        run = types.SimpleNamespace(sections=s, program=program, hosts=Alone(), data=data, stages=[None])
        run.stage = types.SimpleNamespace(start=3, number=1)
        return steps.compile_stage(run, "the first step", {}, quiet, lambda line: None)

    assert compiled(None) == "compiled"
    with pytest.raises(ValueError, match="the loss differs"):
        compiled("the loss differs")
    assert read == [(3, slice(0, 1))] * 2
