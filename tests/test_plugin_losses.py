"""Losses, sources and batches of one's own: their numbers against plain formulas, and what stays as it is."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plugged import plugins_of_a_test
from small_run import TINY

from ejdist import registered
from ejdist.models.decoder import DecoderConfig, token_losses
from ejdist.models.lora import build as model_of
from ejdist.models.model import Metric, StepContext
from ejdist.models.parameters import initialise
from ejdist.operations import bind_ops
from ejdist.plugins import LossTerms, Reference, register_loss
from ejdist.training.data import DataSection, build
from ejdist.training.data.own_batches import OwnBatches
from ejdist.training.flops import step_flops
from ejdist.training.loop import train
from ejdist.training.losses import BoundModel, Trained, named_loss
from ejdist.training.step import init_state, make_train_step
from recipes.schema import compose

ROOT = Path(__file__).resolve().parent.parent
OPS = bind_ops(None)
PAIRS = [
    {"prompt": "Is it warm? ", "chosen": "yes", "rejected": "no, not at all"},
    {"prompt": "Sure? ", "chosen": "yes, I am", "rejected": "no"},
    {"prompt": "Will it rain? ", "chosen": "it will", "rejected": "no"},
]
DPO = [*TINY, "plugins=[examples.dpo_loss]", "loss=dpo", "dpo.beta=0.3", "data=files", "data.source=pairs:pairs.jsonl"]
DPO += ["model.num_layers=1", "mesh.sp=1", "data.sequence_length=80", "data.global_batch=2"]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    Path("pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in PAIRS))
    with plugins_of_a_test():
        yield


def own(name="double", function=None, **more):
    """Registers a loss that needs no model, and returns its entry."""
    register_loss(name, function or (lambda model, batch: LossTerms(jnp.float32(2), jnp.int32(1), {})), **more)
    return registered.entry_of("loss", name)


def each_alone():
    """Returns the conversations of the pairs, chosen and rejected in turn, each in a row of its own."""
    ids = [[*(pair["prompt"] + pair[name]).encode(), 256] for pair in PAIRS for name in ("chosen", "rejected")]
    alone = {name: np.zeros((6, 40), np.int32) for name in ("tokens", "targets", "positions", "segment_ids")}
    for i, (row, prompt) in enumerate(zip(ids, [p["prompt"] for p in PAIRS for _ in range(2)], strict=True)):
        alone["tokens"][i, : len(row)] = row
        alone["targets"][i] = -1
        alone["targets"][i, len(prompt) - 1 : len(row) - 1] = row[len(prompt) :]
        alone["positions"][i] = np.arange(40)
        alone["segment_ids"][i] = np.where(np.arange(40) < len(row), 0, -1)
    return alone


# -- preferences -------------------------------------------------------------------------------------------------------


def test_dpo_is_the_formula_and_only_the_policy_has_a_gradient():
    recipe = compose(DPO)
    trained = Trained(recipe, recipe.model.build())
    model, data = trained.with_references(), build(recipe.data, seed=0)
    assert set(model.buffers) == {"reference"} and data.notes() == ["data.source: rows that examples.dpo_loss packs"]
    start = initialise(model.declared, jax.random.key(0))
    buffers = trained.start(start, initialise(model.buffers, jax.random.key(0)))
    np.testing.assert_array_equal(buffers["reference"]["params"]["embedding"], start["embedding"])
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.05 * rng.standard_normal(x.shape).astype(np.float32), start)
    batch = data.batch(0)

    @jax.jit
    def both(params, buffers):
        def total(params, buffers):
            return trained.loss(params, batch, OPS, StepContext(buffers=buffers))

        return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(params, buffers)

    (found, metrics), (of_policy, of_reference) = both(params, buffers)
    alone = each_alone()
    sums = jax.jit(lambda p: token_losses(p, alone, recipe.model, OPS).sum(axis=1))
    ours, theirs = (-np.asarray(sums(p), np.float64).reshape(3, 2) for p in (params, start))
    margins = 0.3 * ((ours - theirs)[:, 0] - (ours - theirs)[:, 1])
    rows = np.concatenate([data.batch(0)["segment_ids"].max(axis=1) + 1]) // 2
    assert sorted(rows) == [1, 2] and metrics["terms"].value == 3  # whole pairs: the third is in a row of its own
    np.testing.assert_allclose(found, np.log1p(np.exp(-margins)).sum(), rtol=1e-4)
    np.testing.assert_allclose(metrics["reward_margin"].value, margins.sum(), rtol=1e-3)
    assert metrics["reward_accuracy"].value == (margins > 0).sum() and abs(margins).min() > 1e-3
    assert metrics["tokens"].value == (batch["targets"] >= 0).sum()
    assert all(not np.any(g) for g in jax.tree.leaves(of_reference))
    assert all(np.any(g) for g in jax.tree.leaves(of_policy))


def test_one_forward_of_a_reference_is_counted():
    recipe, segments = compose([*DPO, "lora.rank=2"]), np.array([[0] * 5 + [1] * 2 + [-1]])
    for model in (recipe.model.build(), model_of(recipe.model, recipe.lora)):
        alone, both = (step_flops(m.flops, segments) for m in (model, Trained(recipe, model).with_references()))
        forward = sum(part.token for part in model.flops) * 8
        pairs = sum(part.pair for part in model.flops)
        assert both.causal - alone.causal == forward + pairs * (15 + 3)
        assert both.full - alone.full == forward + pairs * 64


@pytest.mark.slow
def test_the_reference_of_adapters_shares_their_base():
    recipe = compose([*DPO, "lora.rank=2", "lora.base=float32"])
    adapted = model_of(recipe.model, recipe.lora)
    trained = Trained(recipe, adapted)
    model, batch = trained.with_references(), build(recipe.data, seed=0).batch(0)
    start = initialise(model.declared, jax.random.key(0))
    buffers = trained.start(start, initialise(model.buffers, jax.random.key(1)))
    assert set(buffers) == {"base", "reference"} and set(buffers["reference"]) == {"params"}
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32), start)

    @jax.jit
    def both(params):
        def total(params):
            return trained.loss(params, batch, OPS, StepContext(buffers=buffers))[0]

        return jax.value_and_grad(total)(params)

    (first, gradient), (later, _) = both(start), both(params)
    np.testing.assert_allclose(first, 3 * np.log(2), rtol=1e-6)  # the policy is the reference
    assert all(np.any(adapter["b"]) for adapter in gradient["layers"].values())
    context, alone = StepContext(buffers={"base": buffers["base"]}), each_alone()
    sums = jax.jit(lambda p: adapted.token_losses(p, alone, ops=OPS, context=context).sum(axis=1))
    ours, theirs = (-np.asarray(sums(p), np.float64).reshape(3, 2) for p in (params, start))
    margins = 0.3 * ((ours - theirs)[:, 0] - (ours - theirs)[:, 1])
    np.testing.assert_allclose(later, np.log1p(np.exp(-margins)).sum(), rtol=1e-4)
    assert abs(margins).min() > 1e-3


def test_no_step_changes_a_reference():
    recipe = compose(DPO)
    model = Trained(recipe, recipe.model.build()).with_references()
    kept = {"params": {"embedding": np.ones(3)}}
    assert model.update({"reference": kept}, {}) == {"reference": kept}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            "pairs.jsonl, line 1 has no 'rejected'; a pair has prompt, chosen and rejected",
        ),
        (
            {"prompt": "a" * 60, "chosen": "b", "rejected": "c"},
            "line 1 has 124 tokens; data.sequence_length = 80 must hold a",
        ),
        (None, "pairs.jsonl has no pairs"),
    ],
)
def test_pairs_that_are_wrong(line, said):
    Path("pairs.jsonl").write_text("" if line is None else json.dumps(line))
    with pytest.raises(ValueError, match=said):
        build(compose(DPO).data, seed=0)


# -- teachers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # the same path as DPO's, above
def test_distillation_is_the_formula():
    from examples.distillation import DistillSection, distill, references

    sizes = {"vocab_size": 31, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "ffn_dim": 24}
    student = DecoderConfig(num_layers=1, model_dim=16, tie_embeddings=False, **sizes)
    teacher = DecoderConfig(num_layers=2, model_dim=24, logits_soft_cap=2.0, **sizes)
    rng = np.random.default_rng(1)
    batch = {"tokens": rng.integers(0, 31, (2, 12)), "positions": np.tile(np.arange(12), (2, 1))}
    batch |= {"segment_ids": np.zeros((2, 12)), "targets": np.where(rng.random((2, 12)) < 0.3, -1, batch["tokens"])}
    batch = {name: x.astype(np.int32) for name, x in batch.items()}
    context = StepContext()

    @jax.jit
    def numbers(key):
        bound = [BoundModel(c.build(), initialise(c.build().declared, key), OPS, context) for c in (student, teacher)]
        logits = []
        for one in bound:
            one.params["embedding" if "lm_head" not in one.params else "lm_head"] *= 30  # logits that differ
            head, cap = one.projection()
            raw = one.hidden(batch)[0] @ head
            logits.append(raw if cap is None else cap * jnp.tanh(raw / cap))
        return distill(bound[0], batch, DistillSection("", 0.25, 3.0), bound[1]), logits

    terms, logits = numbers(jax.random.key(0))
    ours, theirs = (np.asarray(x, np.float64) for x in logits)

    def log_softmax(x):
        x = x - x.max(axis=-1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))

    counted = batch["targets"] >= 0
    q, p = log_softmax(ours / 3), log_softmax(theirs / 3)
    divergence = 9 * ((np.exp(p) * (p - q)).sum(axis=-1) * counted).sum()
    plain = -np.take_along_axis(log_softmax(ours), np.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    assert terms.count == counted.sum() and divergence > 0.1
    np.testing.assert_allclose(terms.metrics["divergence"].value, divergence, rtol=2e-3)
    np.testing.assert_allclose(terms.total, 0.75 * (plain * counted).sum() + 0.25 * divergence, rtol=1e-3)
    with pytest.raises(ValueError, match=r"distill.teacher is missing: give the run.dir of a run"):
        references(DistillSection())


# -- terms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_mean_is_over_terms_however_the_batch_is_divided(accumulation):
    def loss(params, batch, *, context):
        total, count = (params * batch["x"]).sum(), (batch["x"] > 0).sum().astype(jnp.float32)
        return total, {"loss": Metric(total, "loss"), "tokens": Metric(jnp.int32(100)), "terms": Metric(count)}

    sgd = optax.GradientTransformationExtraArgs(lambda p: (), lambda g, s, p=None, **_: (g, s))
    x = np.array([[1, 2], [3, 0], [4, 5], [0, 6]], np.float32)
    step = jax.jit(make_train_step(loss, sgd, accumulation=accumulation))
    state, metrics = step(init_state(jnp.float32(2), sgd), {"x": x})
    assert metrics["loss"] == pytest.approx(2 * 21 / 6) and state.params == pytest.approx(2 + 21 / 6)
    assert metrics["terms"] == 6 and metrics["tokens"] == 100 * accumulation


def test_losses_of_layers_count_as_many_terms_as_there_are():
    recipe = compose([*TINY, "recipe=moe", "model=moe_nano", "mesh=single"])

    def pairs(model, batch):
        layers = {
            "balance": Metric(jnp.float32(12), "loss"),
            "entropy": Metric(jnp.float32(6), "mean"),
            "n": Metric(jnp.int32(3)),
        }
        return LossTerms(jnp.float32(10), jnp.int32(2), layers, {"margin": Metric(jnp.float32(4), "mean")})

    own("pairs", pairs)
    recipe.loss = "pairs"
    trained = Trained(recipe, recipe.model.build())
    batch = {"targets": np.array([[0, 1, 2, -1, 5, 6, 7]])}
    buffers = initialise(trained.model.buffers, jax.random.key(0))
    total, metrics = trained.loss({}, batch, OPS, StepContext(buffers=buffers))
    # 6 tokens and 2 pairs: over pairs, a mean of tokens is what it was.
    assert total == 10 + 12 * 2 / 6 and metrics["entropy"].value == 6 * 2 / 6 and metrics["n"].value == 3
    assert metrics["tokens"].value == 6 and metrics["terms"].value == 2 and metrics["margin"].value == 4


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda model, batch: jnp.float32(1), "must return LossTerms with a scalar total and count, got"),
        (lambda model, batch: LossTerms(jnp.ones(2), jnp.int32(1), {}), "must return LossTerms with a scalar total"),
        (
            lambda model, batch: LossTerms(jnp.float32(1), jnp.int32(1), {}, {"loss": Metric(jnp.float32(1))}),
            "returns the metric 'loss', which the step or a layer has; rename it",
        ),
    ],
)
def test_what_is_no_loss(function, said):
    own("odd", function)
    recipe = compose([*TINY, "loss=odd"])
    with pytest.raises(ValueError, match=f"the loss 'odd' of test_plugin_losses {said}"):
        Trained(recipe, recipe.model.build()).loss({}, {"targets": np.zeros((1, 2))}, OPS, StepContext())
    with pytest.raises(ValueError, match="loss = 'dpo' is unknown; use one of cross_entropy, odd, or give plugins="):
        compose([*TINY, "loss=dpo"]).validate()


def test_references_have_names_that_no_layer_has():
    own(references={"experts": Reference()})
    recipe = compose(["recipe=moe", "loss=double"])
    recipe.model.experts.bias_rate = 0.1
    with pytest.raises(ValueError, match="its reference 'experts' has the name of a layer's buffers; rename it"):
        Trained(recipe, recipe.model.build())


def test_a_loss_from_python_has_the_name_of_its_function():
    def mine(model, batch):
        return LossTerms(jnp.float32(1), jnp.int32(1), {})

    with named_loss(mine) as name:
        assert name.endswith("test_a_loss_from_python_has_the_name_of_its_function.<locals>.mine")
        assert registered.entry_of("loss", name) is not None
    assert registered.entry_of("loss", name) is None
    with pytest.raises(ValueError, match="argument 'loss' is 3; give a function"), named_loss(3):  # type: ignore
        pass
    with pytest.raises(ValueError, match=r"argument 'sections' is str; give a recipe, recipes.schema"):
        train("recipe=long_context")  # type: ignore


# -- sources -----------------------------------------------------------------------------------------------------------


def test_documents_of_ones_own_are_tokenized_once_for_each_content():
    compose(["plugins=[examples.own_source]"])
    Path("text.md").write_text("start\n## one\nabc\n## two\ndef\n")
    section = DataSection(source="chapters:text.md", sequence_length=16, global_batch=1, cache_dir="cache")

    def text(data):
        rows = [data.batch(i)["tokens"][0] for i in range(data.packing.rows_per_epoch)]
        return sorted(bytes(np.concatenate(rows).astype(np.uint8)).replace(b"\x00", b"\n").decode().split("\n"))

    first = build(section, seed=0)
    assert first.corpus.num_documents == 3 and {"abc", "def", "start", "## one"} <= set(text(first))
    Path("text.md").write_text("start\n## one\nxyz\n")
    second = build(section, seed=0)
    assert second.corpus.num_documents == 2 and second.corpus.fingerprint != first.corpus.fingerprint
    assert "xyz" in text(second) and "abc" not in text(second)
    with pytest.raises(ValueError, match=r"data.source = 'chapters:no.md' cannot be read: No such file"):
        build(DataSection(source="chapters:no.md", cache_dir="cache"), seed=0)


def test_conversations_of_ones_own():
    Path("mine.py").write_text(
        "from ejdist.plugins import register_source\n"
        "def read(rest):\n    yield {'prompt': 'Is it? ', 'completion': rest}\n"
        "def odd(rest):\n    yield 3\n"
        "register_source('said', read, identity=str)\nregister_source('odd', odd, identity=str)\n"
        "register_source('nobody', read, identity=lambda rest: None)\n"
    )
    compose(["plugins=[mine]"])
    how = {
        "packing": "whole",
        "format": "completion",
        "chat_template": "chatml",
        "sequence_length": 16,
        "global_batch": 1,
        "cache_dir": "cache",
    }
    batch = build(DataSection(source="said:yes", **how), seed=0).batch(0)
    assert bytes(batch["targets"][batch["targets"] >= 0][:3].astype(np.uint8)) == b"yes"
    with pytest.raises(
        ValueError, match=r"data.source = 'odd:x', row 0 .*: mine yields int, neither a text nor a dict"
    ):
        build(DataSection(source="odd:x", cache_dir="cache"), seed=0)
    with pytest.raises(ValueError, match="identity of mine must return a text, got None"):
        build(DataSection(source="nobody:x", cache_dir="cache"), seed=0)


# -- batches -----------------------------------------------------------------------------------------------------------


def batch_of(step):
    tokens = np.arange(step, step + 9) % 7
    return {"tokens": tokens[None, :8], "targets": tokens[None, 1:]}


SIZES = {"sequence_length": 8, "global_batch": 1, "vocab_size": 7, "seed": 0}


def test_batches_of_a_function_and_of_an_iterable_are_the_same():
    of_function, of_iterable = OwnBatches(batch_of, **SIZES), OwnBatches([batch_of(i) for i in range(9)], **SIZES)
    for data in (of_function, of_iterable):
        found = list(data.iterator(2, 5, number=lambda step: step + 2 * (step > 3)))  # after a rewind
        assert [one["tokens"][0, 0] for one in found] == [2, 3, 6]
        assert found[0]["segment_ids"].tolist() == [[0] * 8] and found[0]["positions"].tolist() == [[*range(8)]]
        assert data.batch(4)["targets"].tolist() == batch_of(4)["targets"].tolist()
    assert of_function.cursor(3) == of_iterable.cursor(3)
    of_function.check_cursor(of_iterable.cursor(3))
    with pytest.raises(ValueError, match="the first batch is not that of the run so far, which had others"):
        OwnBatches(lambda step: batch_of(step + 1), **SIZES).check_cursor(of_function.cursor(3))
    with pytest.raises(ValueError, match="the run so far, which had those of a recipe's data"):
        of_function.check_cursor({"corpus": "abc", "order": "cut"})


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        (iter([batch_of(0)]), "is list_iterator; give a function of the step, or an iterable that begins anew"),
        (3, "is int; give a function"),
        ([], "batch 0 is missing; give as many batches as the run has steps"),
        (lambda step: [1], "batch 0 is list, not a dict of arrays"),
        (lambda step: {"tokens": batch_of(0)["tokens"]}, "batch 0 has no targets"),
        (lambda step: batch_of(0) | {"mask": 1}, "batch 0 has 'mask', which no step reads"),
        (lambda step: {k: x[:, :7] for k, x in batch_of(0).items()}, r"tokens is int64 \[1, 7\], not int32 \[1, 8\]"),
        (lambda step: {k: x + 0.0 for k, x in batch_of(0).items()}, r"tokens is float64 \[1, 8\], not int32"),
        (lambda step: {k: x + 1 for k, x in batch_of(0).items()}, "tokens has 1 to 7; it may have 0 to 6"),
    ],
)
def test_batches_that_are_wrong(batches, said):
    with pytest.raises(ValueError, match=f"train: argument 'batches'.*{said}"):
        OwnBatches(batches, **SIZES)
