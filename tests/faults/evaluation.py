"""Faults of the length curriculum, and of what is measured of a trained model."""

from faults import Fault

CURRICULUM, OPENING, STEPS = (f"ejdist/training/{name}.py" for name in ("curriculum", "opening", "steps"))
FORWARD, RECALL, POSITIONS = (f"ejdist/evaluation/{name}.py" for name in ("forward", "recall", "positions"))
STAGES, EVALUATE = "tests/test_curriculum.py", "tests/test_evaluate.py"

FAULTS = (
    Fault(
        "another function of the weights is evaluated without a word",
        "ejdist/evaluation/weights.py",
        'if not k.startswith("rope_")]:',
        "if False]:",
        f"{EVALUATE} -k only_what_keeps_its_parameters",
    ),
    Fault(
        "an octave begins a place late",
        POSITIONS,
        "np.frexp(np.asarray(places, np.float64))[1]",
        "np.frexp(np.asarray(places, np.float64) - 0.5)[1]",
        f"{EVALUATE} -k octave",
    ),
    Fault(
        "the place in a document counts from 0",
        POSITIONS,
        'batch["positions"] + 1, counted',
        'np.maximum(batch["positions"], 1), counted',
        f"{EVALUATE} -k every_counted",
    ),
    Fault(
        "what has no target counts in the loss by position",
        POSITIONS,
        'counted = (batch["targets"] >= 0) & (batch["segment_ids"] >= 0)',
        'counted = batch["segment_ids"] >= 0',
        f"{EVALUATE} -k every_counted",
    ),
    Fault(
        "losses stay in the order of the mesh",
        FORWARD,
        "np.asarray(self._program.order.inverse(found, axis=1))",
        "found",
        f'{EVALUATE} -k "add_up or four_devices"',
    ),
    Fault(
        "the places of answers are not permuted with the tokens",
        FORWARD,
        'where = self._placed(batch | {"targets": marks})["targets"]',
        'where = jax.device_put(marks, placed["tokens"].sharding)',
        f"{EVALUATE} -k copies",
    ),
    Fault(
        "an answer is looked for a place late",
        RECALL,
        "marks[:, self.length - self.value_tokens :] = np.arange(self.value_tokens)",
        "marks[:, self.length - self.value_tokens + 1 :] = np.arange(self.value_tokens - 1)",
        f"{EVALUATE} -k copies",
    ),
    Fault(
        "an answer is right if one of its tokens is",
        RECALL,
        "int(hits.all(axis=1).sum())",
        "int(hits.any(axis=1).sum())",
        f"{EVALUATE} -k half_right",
    ),
    Fault(
        "the probability of an answer is that of its first token",
        RECALL,
        ".astype(np.float64).sum(axis=1))",
        ".astype(np.float64)[:, 0])",
        f"{EVALUATE} -k copies",
    ),
    Fault(
        "depth goes from the end to the start",
        RECALL,
        "asked = round(depth * (self.pairs - 1))",
        "asked = round((1 - depth) * (self.pairs - 1))",
        f"{EVALUATE} -k a_prompt_holds",
    ),
    Fault(
        "a key may stand in the text too",
        RECALL,
        "if (windows == asked).all(axis=1).sum() == 2:",
        "if (windows == asked).all(axis=1).sum() >= 2:",
        f"{EVALUATE} -k stands_nowhere_else",
    ),
    Fault(
        "the noise of training's router is in the evaluation",
        "launch/evaluate.py",
        "recipe.model.experts.jitter = 0.0",
        "recipe.model.experts.jitter += 0.0",
        f"{EVALUATE} -k only_what_keeps",
    ),
    Fault(
        "the run's own corpus counts as held out",
        "launch/evaluate.py",
        'if trained["corpus"] == data.corpus.fingerprint:',
        'if trained["corpus"] != data.corpus.fingerprint:',
        f"{EVALUATE} -k trained_on",
    ),
    Fault(
        "a stage goes on with the positions of the recipe",
        CURRICULUM,
        "model=replace(sections.model, **model),",
        "model=sections.model,",
        f"{STAGES} -k positions",
    ),
    Fault(
        "the last stage keeps the positions of the one before",
        CURRICULUM,
        "_applied(sections, stage, where)))",
        "_applied(found[-1].sections if found else sections, stage, where)))",
        f"{STAGES} -k its_positions",
    ),
    Fault(
        "a stage goes on after its end",
        STEPS,
        "run, until = begun.run, min(end, begun.run.stage.until)",
        "run, until = begun.run, end",
        f"{STAGES} -k one_schedule",
    ),
    Fault(
        "the second stage reads the rows of the first",
        OPENING,
        "data = self.data.resized(s.data.sequence_length, s.data.global_batch)",
        "data = self.data",
        f"{STAGES} -k one_schedule",
    ),
    Fault(
        "each stage has a schedule of its own",
        CURRICULUM,
        "        curriculum=[],\n",
        "        curriculum=[], run=replace(sections.run, steps=stage.until or sections.run.steps),\n",
        f"{STAGES} -k one_schedule",
    ),
    Fault(
        "a checkpoint at a stage's end is held against the next stage",
        OPENING,
        "s = stage_of(run.stages, step).sections",
        "s = stage_of(run.stages, step + 1).sections",
        f"{STAGES} -k just_ended",
    ),
    Fault(
        "what a run has made may be planned anew",
        CURRICULUM,
        "        if changed:\n",
        "        if False:\n",
        f"{STAGES} -k may_not",
    ),
    Fault(
        "a stage's low frequencies are those of every scaling",
        "ejdist/models/config.py",
        '    "rope_low": "low",\n',
        "",
        "tests/test_model.py -k every_field",
    ),
    Fault(
        "a file's high frequency factor is not read",
        "ejdist/weights/config.py",
        "found[key] = None if value == default else float(value)",
        'found[key] = None if value == default or key == "rope_high" else float(value)',
        "tests/test_weights.py -k its_files",
    ),
)
