"""Multi-token prediction: against NumPy, in every order of a split sequence, in DeepSeek-V3's files, and what it refuses."""

import dataclasses
import json
from types import SimpleNamespace

import decoder_loop
import jax
import jax.numpy as jnp
import numpy as np
import published_loop as published
import pytest
from small_run import TINY
from test_weights import loaded, made, state_in, write

from ejdist.mesh import make_mesh
from ejdist.models import ahead
from ejdist.models.ahead_shape import AheadShape
from ejdist.models.decoder import DecoderConfig
from ejdist.models.model import StepContext
from ejdist.models.parameters import initialise
from ejdist.models.stack import counted_parts
from ejdist.operations import bind_ops
from ejdist.order import Order
from ejdist.sections import validate
from ejdist.training.placing import permuted, place_batch
from ejdist.training.program import make_program
from ejdist.training.resume import fingerprint
from ejdist.training.runs import section_of
from ejdist.training.start import open_source
from ejdist.weights.families import family_of, read_config
from ejdist.weights.files import WeightsError
from ejdist.weights.writer import save
from recipes.schema import compose

ONE = AheadShape(1, 0.25)


def batch_of(vocab, rows=2, length=12, seed=0):
    """Returns rows of two documents and padding, the last of one document to its end; one target is not trained."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, length))
    ids = np.array([[0] * 5 + [1] * (length - 7) + [-1] * 2] * rows)
    ids[-1] = 0
    targets = np.where((ids == np.roll(ids, -1, 1)) & (ids >= 0), np.roll(tokens, -1, 1), -1)
    targets[:, -1] = -1
    targets[0, 2] = -1
    positions = np.array([[*range(5), *range(length - 7), 0, 0]] * rows)
    positions[-1] = np.arange(length)
    batch = {"tokens": tokens, "targets": targets, "segment_ids": ids, "positions": positions}
    return {name: x.astype(np.int32) for name, x in batch.items()}


def test_the_loss_and_its_gradient_are_those_of_numpy(tmp_path):
    """Latent attention and experts with biases, as in DeepSeek-V3; along one random direction of all parameters."""
    made(tmp_path, "deepseek")
    c = dataclasses.replace(read_config(tmp_path)[1], num_layers=2, mtp=ONE)
    model, batch = c.build(), batch_of(c.vocab_size)
    params, buffers = (initialise(tree, jax.random.key(0)) for tree in (model.declared, model.buffers))
    params = jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params)  # no loss of a uniform guess
    buffers["mtp_experts"]["bias"] = jax.random.normal(jax.random.key(1), buffers["mtp_experts"]["bias"].shape)
    ops, context = bind_ops(None), StepContext(buffers=buffers)

    @jax.jit
    def of(params):
        return jax.value_and_grad(lambda p: model.loss(p, batch, ops, context=context), has_aux=True)(params)

    (total, metrics), gradient = of(params)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, buffers))
    alone, more = decoder_loop.forward(*wide, batch, c)[0], decoder_loop.ahead(*wide, batch, c)
    assert float(metrics["loss"].value) == pytest.approx(alone, rel=2e-5)
    assert float(metrics["mtp_loss"].value) == pytest.approx(more, rel=2e-5)
    layers = sum(float(m.value) for name, m in metrics.items() if m.how == "loss" and name.startswith("experts"))
    own = float(metrics["mtp/experts/auxiliary_loss"].value) if layers else 0.0
    assert float(total) == pytest.approx(alone + 0.25 * more + layers + own, rel=2e-5)
    rng, step = np.random.default_rng(3), 1e-5
    names = ("of_embedding", "of_hidden", "embedding_norm", "hidden_norm", "final_norm", "latent_down", "experts_down")
    for name in names:
        way = rng.standard_normal(wide[0]["mtp"][name].shape)

        def moved(by, name=name, way=way):
            return {**wide[0], "mtp": wide[0]["mtp"] | {name: wide[0]["mtp"][name] + by * way}}

        ends = [decoder_loop.ahead(moved(by), wide[1], batch, c) for by in (step, -step)]
        slope = 0.25 * (ends[0] - ends[1]) / (2 * step)
        assert float(np.sum(gradient["mtp"][name] * way)) == pytest.approx(slope, rel=5e-3, abs=1e-4), name
    assert float(jnp.abs(gradient["layers"]["latent_query"]).sum()) > 0


@pytest.mark.parametrize("order", [None, Order("zigzag", 2), Order("striped", 2, 1), Order("balanced", 2, 2)], ids=str)
def test_what_follows_is_read_from_the_text(order):
    """In the order of the batch, and not from the next document or from padding."""
    batch, index = batch_of(50, length=16), None
    if order is not None and order.carried:
        index = np.stack([np.random.default_rng(i).permutation(16) for i in range(2)]).astype(np.int32)
    lain = {n: x if order is None else order.permute(x, index=index) for n, x in batch.items()}
    lain |= {} if index is None else {"order": index}
    ops = SimpleNamespace(order=order, constrain=lambda x, dims: x)
    tokens, targets = ahead.following({n: jnp.asarray(x) for n, x in lain.items()}, ops)
    wanted = np.zeros((2, 16), int), np.full((2, 16), -1)
    for b, t in np.ndindex(2, 15):
        if batch["segment_ids"][b, t] == batch["segment_ids"][b, t + 1] >= 0:
            wanted[0][b, t], wanted[1][b, t] = batch["tokens"][b, t + 1], batch["targets"][b, t + 1]
    for result, right in zip((tokens, targets), wanted, strict=True):
        np.testing.assert_array_equal(result, right if order is None else order.permute(right, index=index))


@pytest.mark.slow  # five programs, a minute and a half
def test_losses_are_the_same_on_every_mesh():
    keys = [*TINY, "model.mtp.modules=1", "optimizer.learning_rate=1e-2", "optimizer.warmup_steps=0"]
    experts = ["model=moe_nano", "model.num_layers=2", "model.model_dim=32", "model.experts.ffn_dim=48"]
    experts += ["model.experts.score=sigmoid", "model.experts.bias_rate=0.01"]
    meshes = (("mesh.sp=1", "zigzag"), ("mesh.sp=2", "zigzag"), ("mesh.sp=2", "striped"), ("mesh.sp=2", "balanced"))
    runs = [([], mesh, order) for mesh, order in meshes] + [
        (experts, mesh, "zigzag") for mesh in ("mesh.ep=1", "mesh.ep=2")
    ]
    ends = {}
    for of_model, mesh, order in runs:
        s = compose([*keys, *of_model, "mesh.sp=1", mesh, f"sequence.order={order}"])
        count = s.mesh.sp * s.mesh.ep
        program = make_program(s, make_mesh(**vars(s.mesh) | {"dp": 1, "fsdp": 1}, devices=jax.devices()[:count]))
        state, rows = program.init(), []
        for seed in range(3):
            batch = permuted(batch_of(s.model.vocab_size, 2, 64, seed), program)
            state, metrics = program.step(state, place_batch(batch, program, np.arange(2)))
            rows.append([float(metrics[name]) for name in ("loss", "mtp_loss", "grad_norm")])
        ends.setdefault(bool(of_model), []).append(rows)
        if of_model:
            moved = float(jnp.abs(state.buffers["mtp_experts"]["bias"]).max())  # by 0.01 a step, up or down
            assert 0.005 < moved < 0.035
    for alike in ends.values():
        for other in alike[1:]:
            np.testing.assert_allclose(alike[0], other, rtol=2e-4)


# -- files ------------------------------------------------------------------------------------------------------------


def with_module(folder):
    """Writes DeepSeek-V3's files with the module; returns (what is in them, the number of its layer)."""
    config = published.MODELS["deepseek"]
    layer, D = config["num_hidden_layers"], config["hidden_size"]
    state = published.tensors(config)
    rng, prefix, last = np.random.default_rng(5), f"model.layers.{layer}.", f"model.layers.{layer - 1}."
    of_layer = {name.replace(last, prefix): x for name, x in state.items() if name.startswith(last)}
    state |= {name: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32) for name, x in of_layer.items()}
    more = {f"{prefix}{name}.weight": rng.standard_normal(D) for name in ("enorm", "hnorm", "shared_head.norm")}
    more[f"{prefix}eh_proj.weight"] = rng.standard_normal((D, 2 * D))
    more[f"{prefix}embed_tokens.weight"] = state["model.embed_tokens.weight"]
    more[f"{prefix}shared_head.head.weight"] = state["lm_head.weight"]
    state |= {name: x.astype(np.float32) for name, x in more.items()}
    write(folder, config | {"num_nextn_predict_layers": 1}, state)
    return state, prefix


def test_the_module_is_read_and_written_as_deepseek_has_it(tmp_path):
    state, prefix = with_module(tmp_path / "theirs")
    alone = read_config(tmp_path / "theirs")[1]
    (note,) = open_source(str(tmp_path / "theirs"), alone).notes
    assert "eh_proj" in note and "multi-token prediction" in note, "by default it is left out"
    c, leaves = loaded(tmp_path / "theirs", dataclasses.replace(alone, mtp=ONE))
    D = c.model_dim
    np.testing.assert_array_equal(leaves["params.mtp.of_embedding"], state[f"{prefix}eh_proj.weight"][:, :D].T)
    np.testing.assert_array_equal(leaves["params.mtp.of_hidden"], state[f"{prefix}eh_proj.weight"][:, D:].T)
    np.testing.assert_array_equal(leaves["params.mtp.embedding_norm"], state[f"{prefix}enorm.weight"])
    np.testing.assert_array_equal(leaves["params.mtp.hidden_norm"], state[f"{prefix}hnorm.weight"])
    assert save(tmp_path / "ours", c, leaves.__getitem__) == "DeepseekV3ForCausalLM"
    back = state_in(tmp_path / "ours")
    assert back.keys() == state.keys()
    for name, x in state.items():
        np.testing.assert_array_equal(back[name], x, err_msg=name)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    for name, model in (("deepseek", c), ("qwen3", DecoderConfig(mtp=ONE))):
        made(tmp_path / name, name)
        other = dataclasses.replace(read_config(tmp_path / name)[1], mtp=model.mtp)
        with pytest.raises(
            WeightsError, match=r"has no layer of multi-token prediction that is read: give model.mtp.mod"
        ):
            open_source(str(tmp_path / name), other)


def test_what_it_cannot_do_is_refused_in_a_sentence():
    def refused(match, *words):
        with pytest.raises(ValueError, match=match):
            validate(compose([*TINY, *words]))

    refused(r"model.mtp.modules = 2 must be 0 or 1", "model.mtp.modules=2")
    refused(r"model.mtp.weight must be positive, got 0", "model.mtp.modules=1", "model.mtp.weight=0")
    refused(r"model.mtp.weight = 0.1 is of the module of model.mtp.modules=1", "model.mtp.weight=0.1")
    refused(r"the cross entropy of the next token: leave lora.rank out", "model.mtp.modules=1", "lora.rank=2")
    refused(r"adds a layer of the kind of the last, 'lightning\+mlp', which must attend", "model.mtp.modules=1",
            "model.layer_pattern=[lightning+mlp]", "model.lightning.num_heads=2", "model.qk_norm=false")  # fmt: skip
    with pytest.raises(WeightsError, match=r"cannot say model.mtp.modules = 1"):
        family_of(compose([*TINY, "model.mtp.modules=1"]).model)
    recipe = compose([*TINY, "model.mtp.modules=1", "model.mtp.weight=0.1"])
    assert section_of(fingerprint(recipe), "run") == recipe.model, "evaluation and export read it from a checkpoint"
    c, plain = (DecoderConfig(mtp=mtp) for mtp in (ONE, AheadShape()))
    assert counted_parts(c) - counted_parts(plain) == dict.fromkeys(counted_parts(plain), 1), "plans count its layer"
    D = c.model_dim
    more = sum(f.token for f in c.build().flops) - sum(f.token for f in plain.build().flops)
    assert more == sum(part.flops(c).token for part in counted_parts(plain)) + 4 * D * D + 2 * c.vocab_size * D
