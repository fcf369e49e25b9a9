"""The evaluate command: sums by octave, prompts, answers of a model that is known, and the same numbers on every mesh."""

import dataclasses
import json
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from known_model import model_of
from shared import once
from small_run import TINY

from ejdist.cluster.hosts import Hosts
from ejdist.evaluation import Cell, Evaluator, Octaves, Prompts, batches_once, loss_by_octave, measure_recall
from ejdist.evaluation.decoding import decode
from ejdist.evaluation.generated import measure_spelled
from ejdist.evaluation.weights import Weights, open_weights
from ejdist.generation.requests import Result
from ejdist.mesh import make_mesh
from ejdist.models.decoder import hidden_states, output_projection
from ejdist.operations import bind_ops
from ejdist.training.data import build as build_data
from ejdist.training.data.tokenizer import ByteTokenizer
from ejdist.training.positions import octave_of
from ejdist.training.program import make_program
from ejdist.training.setup import open_run
from launch import answered
from launch.errors import DONE, WRONG
from launch.evaluate import _lengths, evaluate, main, parse
from launch.evaluation_recipe import recipe_of, told_held_out
from launch.processes import Job
from recipes.schema import compose

TEXT = np.random.default_rng(0).integers(1, 90, 500)


# -- sums by octave -------------------------------------------------------------------------------------------------------


def test_octaves_are_whole_powers_of_two():
    places = np.arange(1, 70)
    assert octave_of(places).tolist() == [len(bin(p)) - 3 for p in places]
    edges = 2 ** np.arange(31)
    assert octave_of(edges).tolist() == list(range(31)) and octave_of(edges[1:] - 1).tolist() == list(range(30))


@dataclass
class Known:
    """Stands for an `Evaluator`: the loss of a token is its id; what has no target has a loss too, which must not count."""

    length: int

    def token_losses(self, batch):
        return batch["tokens"].astype(np.float32)


def test_every_counted_token_is_in_one_octave_of_the_document_and_of_the_row():
    batch = {
        "tokens": np.array([[1, 2, 4, 8, 16, 32, 64, 128]]),
        "targets": np.array([[2, 4, -1, 16, 32, 64, -1, -1]]),
        "positions": np.array([[0, 1, 2, 0, 1, 2, 3, 0]]),
        "segment_ids": np.array([[0, 0, 0, 1, 1, 1, 1, -1]]),
    }
    found = loss_by_octave(Known(8), [batch, batch])
    assert found["document"].sums.tolist() == [2 * (1 + 8), 2 * (2 + 16 + 32), 0, 0]
    assert found["document"].counts.tolist() == [4, 6, 0, 0]
    assert found["row"].sums.tolist() == [2 * 1, 2 * 2, 2 * (8 + 16 + 32), 0]
    assert found["row"].rows()[2] == {"from": 4, "to": 7, "tokens": 6, "sum": 112.0, "loss": 112 / 6}
    assert found["row"].rows()[3]["loss"] is None
    assert found["row"].mean == found["document"].mean == 118 / 10
    assert np.isnan(Octaves.empty(4).mean)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_data_that_is_shorter_than_the_batches_is_counted_once(count, tmp_path):
    (tmp_path / "short.txt").write_text("0123456789" * 9)
    section = compose(
        [*TINY, "data=files", f"data.source={tmp_path}/short.txt", f"data.cache_dir={tmp_path}/cache"]
    ).data
    data = build_data(section, seed=0).resized(16, 4)  # 91 tokens with the end: 6 rows
    found = loss_by_octave(Known(16), batches_once(data, count))
    rows = [data.packing.row(i) for i in range(min(4 * count, 6))]
    assert found["row"].counts.sum() == sum((row["targets"] >= 0).sum() for row in rows)
    assert found["row"].sums.sum() == sum(row["tokens"][row["targets"] >= 0].sum() for row in rows)


# -- prompts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["needle", "recall"])
@pytest.mark.parametrize("length", [19, 64])
def test_a_prompt_holds_its_pair_at_its_depth_and_ends_in_question_and_answer(task, length):
    prompts = Prompts(task, length, TEXT, key_tokens=3, value_tokens=2)
    starts = []
    for depth in (0, 0.5, 1):
        row, answer = prompts.make(depth, 0)
        assert len(row) == length + 1 and (row[-2:] == answer).all()
        key = row[-5:-2]
        places = [i for i in range(length - 5) if (row[i : i + 3] == key).all()]
        assert len(places) == 1 and (row[places[0] + 3 : places[0] + 5] == answer).all()
        starts.append(places[0])
        assert np.array_equal(row, prompts.make(depth, 0)[0]), "a pure function"
        assert not np.array_equal(row, prompts.make(depth, 1)[0])
        assert not np.array_equal(row, dataclasses.replace(prompts, seed=1).make(depth, 0)[0])
    assert starts[0] == ((length + 1 - 5) % 5 if task == "recall" else 0) and starts[2] == length + 1 - 10
    assert starts[0] < starts[1] < starts[2]
    batch, marks = prompts.batch([row])
    assert (batch["targets"][0][marks[0] >= 0] == answer).all() and marks[0].max() == 1
    assert marks[0].tolist() == [-1] * (length - 2) + [0, 1]


def test_keys_are_all_different_and_the_one_that_is_asked_for_stands_nowhere_else():
    prompts = Prompts("recall", 900, TEXT, key_tokens=2, value_tokens=1)
    row, _ = prompts.make(0.3, 0)
    body = row[-3 - prompts.pairs * 3 : -3].reshape(-1, 3)
    assert prompts.pairs == 299 and len({tuple(key) for key in body[:, :2].tolist()}) == 299
    few = np.random.default_rng(1).integers(0, 3, 400)  # 27 keys, of which 12 tokens have a third by chance
    for i in range(20):
        row, _ = Prompts("needle", 12, few, key_tokens=3, value_tokens=1).make(0.5, i)
        key = row[-4:-1].tolist()
        assert sum(row[j : j + 3].tolist() == key for j in range(len(row) - 3)) == 2


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"task": "hay"}, "'hay' is unknown; use needle or recall"),
        ({"length": 14}, "lengths: a prompt of 14 tokens.*at least 15"),
        ({"key_tokens": 0}, "key_tokens = 0"),
        ({"task": "recall", "length": 4000, "key_tokens": 1}, "too few for the .* different keys"),
    ],
)
def test_a_prompt_that_cannot_be_made_names_the_key(keys, words):
    with pytest.raises(ValueError, match=words):
        Prompts(**{"task": "needle", "length": 64, "text": TEXT} | keys)


def test_the_interval_is_wilsons():
    half, none, all_of = (Cell("needle", 8, 0.0, 10, n, 0.0, 0.0).interval for n in (5, 0, 10))
    assert half == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert none == pytest.approx((0, 0.2775), abs=1e-4) and all_of == pytest.approx((0.7225, 1), abs=1e-4)


# -- a model that is known ------------------------------------------------------------------------------------------------


@dataclass
class Copier:
    """A model that says what came after the last `suffix` tokens where they stood before, less than `window` back."""

    vocab_size: int = 96
    suffix: int = 3
    window: int = 10**6

    def build(self):
        return model_of(self.at)

    def at(self, params, batch, marks, ops, *, count, context):
        length = batch["tokens"].shape[1]

        def one(tokens, positions, marks):
            text = jnp.zeros(length, jnp.int32).at[positions].set(tokens)
            back = jnp.stack([jnp.roll(text, j) for j in range(self.suffix)])
            places = jnp.arange(length)

            def answer(i):
                here = jnp.sum(jnp.where(marks == i, positions, 0))
                same = (back == back[:, here][:, None]).all(axis=0) & (places < here) & (here - places < self.window)
                said = jnp.where(same.any(), text[jnp.argmax(same) + 1], 0)
                return 8.0 * jax.nn.one_hot(said, self.vocab_size)

            return jax.vmap(answer)(jnp.arange(count))

        return jax.vmap(one)(batch["tokens"], batch["positions"], marks)


@pytest.mark.parametrize("task", ["needle", "recall"])
def test_a_model_that_copies_recalls_all_and_one_that_sees_less_recalls_what_it_sees(task):
    """In zigzag order over four devices, where no answer lies where it does in the text."""
    recipe = compose([*TINY, "mesh.sp=4", "guards.spike=skip"])
    mesh = make_mesh(sp=4, devices=jax.devices()[:4])
    prompts = Prompts(task, 64, TEXT, key_tokens=3, value_tokens=2)
    for window, right in ((10**6, [5, 5, 5]), (40, [0, 5, 5]), (3, [0, 0, 0])):
        evaluator = Evaluator(dataclasses.replace(recipe, model=Copier(window=window)), mesh, {}, {})
        cells = measure_recall(evaluator, prompts, [0, 0.5, 1], 5)
        assert [cell.correct for cell in cells] == right and {cell.count for cell in cells} == {5}
        for cell in cells:
            # The logit of what it says is 8, and of each other id 0.
            at_all = -np.log1p(95 * np.exp(-8.0))
            assert cell.log_probability == pytest.approx(2 * (at_all if cell.correct else at_all - 8), rel=1e-4)
            assert cell.tokens_correct == cell.accuracy


def test_an_answer_that_is_half_right_is_wrong():
    """Of a model that knows the first token of every answer, and of none the second; the last batch has a row too many."""

    class Half:
        rows = 2

        def answers(self, batch, marks, given):
            best = given * (np.arange(given.shape[1]) == 0)
            return best, np.log(np.array([[0.5, 0.25]] * len(given)))

    cells = measure_recall(Half(), Prompts("needle", 64, TEXT, key_tokens=3, value_tokens=2), [0, 1], 3)
    assert [(c.count, c.correct, c.tokens_correct) for c in cells] == [(3, 0, 0.5)] * 2
    assert cells[0].log_probability == pytest.approx(np.log(0.125))


# -- a run ----------------------------------------------------------------------------------------------------------------


SMALL = ["data.global_batch=2", "sequence.order=zigzag"]
TASKS = ["lengths=64", "batches=2", "examples=3", "depths=0,1"]


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """The run.dir of a run with a checkpoint, and beside it an evaluation on four devices."""

    def make(folder):
        run = open_run(compose([*TINY, *corpus, "model.init_std=0.2", f"run.dir={folder}"]), Hosts(60))
        run.checkpoints.save(2, run.program.init(), run.checkpoint_metadata(2))
        run.checkpoints.close()
        arguments = [f"run.dir={folder}", *corpus, *SMALL, *TASKS, "mesh.sp=4", f"to={folder}/evaluation.json"]
        assert main(arguments) == DONE

    return once(tmp_path_factory, "evaluated", make)


def check_same_cells(found, wanted):
    """The same answers; sums over devices are in any order."""
    for a, b in zip(found, wanted, strict=True):
        assert all(a[key] == b[key] for key in ("task", "length", "depth", "correct", "count", "tokens_correct"))
        assert a["log_probability"] == pytest.approx(b["log_probability"], rel=1e-5)


def test_four_devices_find_what_one_does(trained, corpus):
    args, where, keys = parse([f"run.dir={trained}", *corpus, *SMALL, *TASKS, "mesh=single"])
    said = []
    four, one = json.loads((trained / "evaluation.json").read_text()), evaluate(args, where, keys, said.append)
    told = "\n".join(said)
    assert four["mesh"]["sp"] == 4 and one["mesh"]["sp"] == 1
    for place in ("document", "row"):
        for a, b in zip(four["loss"]["64"][place], one["loss"]["64"][place], strict=True):
            assert (a["from"], a["tokens"]) == (b["from"], b["tokens"])
            assert a["sum"] == pytest.approx(b["sum"], rel=1e-5)
    assert len(four["recall"]) == 4
    check_same_cells(four["recall"], one["recall"])
    assert all(words in told for words in ("NOT held out", "step 2 of the run", "needle at 64 tokens, depth 1: ")), told
    assert (trained / "evaluation.png").read_bytes()[:4] == b"\x89PNG"


def test_octaves_add_up_to_the_models_own_loss_and_answers_are_those_of_all_logits(trained, corpus):
    found = json.loads((trained / "evaluation.json").read_text())["loss"]["64"]
    recipe = compose([*TINY, *corpus, "mesh.sp=1"])
    weights, mesh = open_weights(str(trained)), make_mesh(devices=jax.devices()[:1])
    evaluator = Evaluator(recipe, mesh, {}, {})
    params, _ = weights.load(evaluator._program)
    data, ops = build_data(recipe.data, seed=recipe.run.seed), bind_ops(None)
    model = recipe.model.build()
    numbers_of = jax.jit(lambda params, batch: model.loss(params, batch, ops=ops)[1])
    sums = [numbers_of(params, data.batch(i)) for i in range(2)]
    total, tokens = (sum(float(s[name].value) for s in sums) for name in ("loss", "tokens"))
    for place in ("document", "row"):
        assert sum(row["tokens"] for row in found[place]) == found["tokens"] == tokens
        assert sum(row["sum"] for row in found[place]) == pytest.approx(total, rel=1e-5)
    batch = data.batch(0)
    hidden = jax.jit(lambda params, batch: hidden_states(params, batch, recipe.model, ops))(params, batch)
    hidden = np.asarray(hidden, np.float64)
    logits = hidden @ np.asarray(output_projection(params, recipe.model), np.float64)
    marks, rng = np.full((2, 64), -1, np.int32), np.random.default_rng(0)
    places, given = np.array([[5, 40, 63], [0, 1, 31]]), rng.integers(0, 256, (2, 3)).astype(np.int32)
    np.put_along_axis(marks, places, np.arange(3, dtype=np.int32), axis=1)
    best, scores = Evaluator(recipe, mesh, params, {}).answers(batch, marks, given)
    chosen = np.take_along_axis(logits, places[..., None], axis=1)
    assert (best == chosen.argmax(-1)).all()
    wanted = np.take_along_axis(chosen, given[..., None], -1)[..., 0] - np.log(np.exp(chosen).sum(-1))
    np.testing.assert_allclose(scores, wanted, rtol=1e-5)


def test_the_model_is_the_runs_and_only_what_keeps_its_parameters_may_change(trained, corpus):
    weights = open_weights(str(trained))
    recipe = recipe_of(weights, [*corpus, "recipe=moe", "model.rope_scaling=yarn", "model.rope_factor=4.0"])
    assert dataclasses.replace(recipe.model, rope_scaling=None, rope_factor=1.0) == weights.model
    assert recipe.model.rope_scaling == "yarn"
    noisy = dataclasses.replace(weights, model=compose(["model=moe_nano", "model.experts.jitter=0.1"]).model)
    assert recipe_of(noisy, []).model.experts.jitter == 0
    limited = dataclasses.replace(weights, recipe={"experts.capacity": 1.5})
    assert recipe_of(limited, []).experts.capacity == 1.5
    for these, other in ((limited, "null"), (weights, "1.5")):
        with pytest.raises(ValueError, match=r"experts.capacity = .* drops other tokens"):
            recipe_of(these, [f"experts.capacity={other}"])
    with pytest.raises(ValueError, match=r"model.num_layers.*has other parameters"):
        recipe_of(weights, ["model.num_layers=3"])
    for key, value in (("norm_eps", 0.5), ("logits_soft_cap", 3.0), ("activation", "gelu")):
        with pytest.raises(
            ValueError, match=rf"model.{key} = {value} in this recipe, .* only model.rope_ keys can be tried"
        ):
            recipe_of(weights, [f"model.{key}={value}"])
    assert recipe_of(weights, ["model.remat=full", "model.compute_dtype=bfloat16"]).model.remat == "full"


def test_rows_are_as_long_as_is_asked_for_or_as_in_training():
    weights = Weights("these", compose([]).model, dict, str, {"sequence_length": 64})
    for words, lengths in (
        ([], [64]),
        (["data.sequence_length=96"], [96]),
        (["lengths=32", "data.sequence_length=96"], [32]),
    ):
        args, _, given = parse(["run.dir=a", *words])
        assert _lengths(args, weights, compose(given), given) == lengths


def test_what_the_model_was_trained_on_is_said(corpus):
    data = build_data(compose([*TINY, *corpus]).data, seed=0)
    known = {"corpus": data.corpus.fingerprint, "tokenizer": data.corpus.tokenizer.fingerprint}
    weights = Weights("these", compose([]).model, dict, str, known)
    assert told_held_out(weights, data).startswith("NOT held out")
    assert told_held_out(dataclasses.replace(weights, data=known | {"corpus": "other"}), data).startswith(
        "not the run's corpus"
    )
    assert "is not known" in told_held_out(dataclasses.replace(weights, data={}), data)
    with pytest.raises(ValueError, match=r"data.tokenizer is not the one"):
        told_held_out(dataclasses.replace(weights, data=known | {"tokenizer": "other"}), data)
    for eos, words in ((None, "have 256, and those of the run none.*data.eos=null"), ("256", None)):
        kept = dataclasses.replace(weights, data=known | {"bos": None, "eos": eos})
        if words is None:
            assert told_held_out(kept, data).startswith("NOT held out")
        else:
            with pytest.raises(ValueError, match=words):
                told_held_out(kept, data)
    endless = build_data(compose([*TINY, *corpus, "data.eos=null"]).data, seed=0)
    with pytest.raises(ValueError, match=r"data.eos: documents here have none, .* give data.eos=auto"):
        told_held_out(kept, endless)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give run.dir=DIR, or model.init_from=DIR"),
        (["run.dir=a", "model.init_from=b"], "one of the two"),
        (["run.dir=a", "model=8b"], "the model comes from the weights"),
        (["run.dir=a", "curriculum=[{until: 3}]"], "an evaluation has no stages"),
        (
            ["run.dir=a", "tasks=loss,hay"],
            "'hay' is unknown; use some of loss, needle, recall, spelled, answers, ruler, niah_single_1",
        ),
        (["run.dir=a", "lengths=1,2"], "lengths = '1,2' must be different numbers from 2 on"),
        (["run.dir=a", "lengths=many"], "lengths = 'many'"),
        (["run.dir=a", "lengths=1_6"], "lengths = '1_6'"),
        (["run.dir=a", "lengths=[32,6_4]"], r"lengths = '\[32,6_4\]'"),
        (["run.dir=a", "depths=0,0_1"], "depths = '0,0_1'"),
        (["run.dir=a", "depths=0,2"], "depths = '0,2' must be from 0"),
        (["run.dir=a", "examples=0"], "examples = '0' must be a positive number"),
        (["run.dir=a", "step=1", "step=2"], "step is given twice"),
        (["run.dir=a", "to=/nowhere/at/all.json"], "an existing folder"),
        (["run.dir=a", "to=found.txt"], "must be a file .json"),
        (["run.dir=a", "tasks=answers"], "tasks=answers needs prompts=FILE.jsonl"),
        (["run.dir=a", "prompts=a.jsonl"], "prompts is for tasks=answers; add that, or leave it out"),
        (
            ["run.dir=a", "tasks=answers", "prompts=a.jsonl", "max_tokens=0"],
            "max_tokens = '0' must be a positive number",
        ),
        (["run.dir=a", "tasks=answers", "prompts=a.jsonl", "chat=maybe"], "must be auto, true or false"),
        (["run.dir=a", "lenghts=64"], "unknown key 'lenghts'; did you mean 'lengths'"),
    ],
)
def test_a_wrong_key_is_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        parse(arguments)


def test_a_recipe_of_stages_is_evaluated_on_the_mesh_that_is_given():
    keys = parse(["run.dir=a", "recipe=length_curriculum", "mesh.sp=2"])[2]
    recipe = compose(keys)  # which refuses mesh.sp where every stage has a mesh of its own
    assert recipe.mesh.sp == 2 and recipe.curriculum == []


def test_what_is_no_key_no_run_and_no_step_is_refused(trained, tmp_path, capsys):
    for arguments, words in (
        ([f"run.dir={trained}", "exampels=3"], "unknown key 'exampels'"),
        ([f"run.dir={tmp_path}"], "has neither checkpoints nor config.json"),
        ([f"run.dir={trained}", "step=7"], "no checkpoint of step 7"),
    ):
        assert main(arguments) == WRONG
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_two_hosts_find_what_one_does_and_refuse_to_differ(trained, corpus, tmp_path):
    """As real processes with two devices each, which share the sequence."""
    command = (sys.executable, "-m", "launch.evaluate")
    arguments = [f"run.dir={trained}", *corpus, *SMALL, *TASKS, "run.host_timeout=120"]
    job = Job(2, tmp_path / "logs", 2, command).start([*arguments, "mesh.sp=4", f"to={tmp_path}/two.json"])
    assert job.wait(300) == [DONE, DONE], job.log(0).read_text() + job.log(1).read_text()
    two, one = (json.loads(path.read_text()) for path in (tmp_path / "two.json", trained / "evaluation.json"))
    check_same_cells(two["recall"], one["recall"])
    for a, b in zip(two["loss"]["64"]["row"], one["loss"]["64"]["row"], strict=True):
        assert a["tokens"] == b["tokens"] and a["sum"] == pytest.approx(b["sum"], rel=1e-6)
    assert job.log(1).read_text().count("loss at") == 0, "one of them speaks"
    job = Job(2, tmp_path / "other", 2, command)
    job.start([*arguments, "mesh.sp=4"], of_host={1: ["model.rope_base=5e4"]})
    assert job.wait(300, after_first=60) == [WRONG, WRONG]
    assert "host 1" in job.log(0).read_text() and "model.rope_base = 50000.0" in job.log(0).read_text()


# -- what is generated ----------------------------------------------------------------------------------------------------


class Writer:
    """Stands for an engine whose texts are known: the answers of a list, two requests at a time, the last one first."""

    def __init__(self, answers):
        self.answers, self.prompts, self.waiting, self.done = answers, [], [], {}

    def submit(self, prompt, *, max_tokens, temperature):
        assert temperature == 0 and max_tokens == len(self.answers[0]) and len(prompt)
        self.prompts.append(prompt)
        self.waiting.append(len(self.prompts) - 1)
        return self.waiting[-1] + 100

    @property
    def idle(self):
        return not self.waiting

    def step(self):
        for number in reversed([self.waiting.pop(0) for _ in range(min(2, len(self.waiting)))]):
            tokens = self.answers[number].tolist()
            self.done[number + 100] = Result(number + 100, self.prompts[number], tokens, [-0.5] * 2, "length", None)

    def results(self):
        done, self.done = self.done, {}
        return done


def test_a_value_is_spelled_out_where_all_its_tokens_are_written():
    prompts = Prompts("recall", 64, TEXT, key_tokens=3, value_tokens=2)
    asked = [prompts.make(depth, i) for depth in (0, 1) for i in range(3)]
    answers = [answer.copy() for _, answer in asked]
    answers[1][1] += 1
    answers[5] += 1
    engine = Writer(answers)
    first, last = measure_spelled(engine, prompts, [0, 1], 3)
    assert (first.correct, first.tokens_correct, first.log_probability) == (2, 5 / 6, -1.0)
    assert (last.correct, last.tokens_correct, last.depth, last.task) == (2, 4 / 6, 1, "spelled")
    assert all((x == row[:-2]).all() for x, (row, _) in zip(engine.prompts, asked, strict=True))


@pytest.mark.slow
def test_answers_that_are_generated(trained, corpus, tmp_path):
    """On two devices, those of greedy decoding without a cache; a row is exact, or has a right answer in it."""
    prompts = "def ", "import sys\n", "    return x"
    recipe = compose([*TINY, *corpus])
    program = make_program(recipe, make_mesh(sp=2, devices=jax.devices()[:2]))
    params, _ = open_weights(str(trained)).load(program)
    evaluator = Evaluator(recipe, program.mesh, params, {}, program)
    tokenizer = build_data(recipe.data, seed=0).corpus.tokenizer
    asked = [Greedy(np.asarray(tokenizer.encode(prompt), np.int32)) for prompt in prompts]
    known = {one: tokenizer.decode(answer.ids) for one, answer in decode(evaluator, asked, tokenizer.stop_ids)}
    wanted = [known[one] for one in asked]
    answers = [f" {wanted[0].upper()}", "?"], wanted[1].strip()[1:], "\u1234"
    rows = [json.dumps({"prompt": p, "answer": a}) for p, a in zip(prompts, answers, strict=True)]
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    words = [f"run.dir={trained}", *corpus, *SMALL, "mesh.sp=2", f"prompts={tmp_path}/p.jsonl", "max_tokens=8"]
    args, where, keys = parse([*words, "tasks=spelled,answers", "lengths=64", "examples=2", "depths=1"])
    said = []
    found = evaluate(args, where, keys, said.append)
    assert [row["text"] for row in found["answers"]["rows"]] == wanted
    assert [(row["exact"], row["right"]) for row in found["answers"]["rows"]] == [
        (True, True),
        (False, True),
        (False, False),
    ]
    assert (found["answers"]["exact"], found["answers"]["right"], found["answers"]["count"]) == (1, 2, 3)
    assert "1 of 3 exact (33.3%, 95% in 6% to 79%), 2 with a right one in them (66.7%)" in "\n".join(said)
    assert [cell["task"] for cell in found["recall"]] == ["spelled"] and found["recall"][0]["count"] == 2


@dataclass(frozen=True, eq=False)
class Greedy:
    """A prompt for `decode`, without a right answer."""

    prompt: np.ndarray
    answer: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1, np.int32))
    tokens: int = 8


@pytest.mark.parametrize(
    ("row", "words"), [('"only a prompt"', 'prompt 1 has no "answer"'), ('{"prompt": "", "answer": "a"}', "no tokens")]
)
def test_a_prompt_without_tokens_or_an_answer_is_named(row, words, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' + row)
    args = answered.AnswersArgs(str(tmp_path / "p.jsonl"), 4, "auto")
    with pytest.raises(ValueError, match=words):
        answered.prepare(args, ByteTokenizer(), compose([]), is_run=True)
