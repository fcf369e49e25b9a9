"""Faults of the length curriculum, and of what is measured of a trained model."""

from faults import Fault

CURRICULUM, OPENING, STEPS = (f"ejdist/training/{name}.py" for name in ("curriculum", "opening", "steps"))
RECALL = "ejdist/evaluation/recall.py"
FORWARD, POSITIONS = (f"ejdist/training/{name}.py" for name in ("forward", "positions"))
STAGES, EVALUATE = "tests/test_curriculum.py", "tests/test_evaluate.py"

FAULTS = (
    Fault(
        "another function of the weights is evaluated without a word",
        "Weights.check",
        "not $k.startswith('rope_')",
        "False",
        f"{EVALUATE} -k only_what_keeps_its_parameters",
    ),
    Fault(
        "an octave begins a place late",
        "octave_of",
        "np.asarray($places, np.float64)",
        "np.asarray($places, np.float64) - 0.5",
        f"{EVALUATE} -k octave",
    ),
    Fault(
        "the place in a document counts from 0",
        "loss_by_octave",
        "$batch['positions'] + 1",
        "np.maximum($batch['positions'], 1)",
        f"{EVALUATE} -k every_counted",
    ),
    Fault(
        "what has no target counts in the loss by position",
        "loss_by_octave",
        "($batch['targets'] >= 0) & ($batch['segment_ids'] >= 0)",
        "$batch['segment_ids'] >= 0",
        f"{EVALUATE} -k every_counted",
    ),
    Fault(
        "losses stay in the order of the mesh",
        "Evaluator.token_losses",
        "np.asarray(self._program.order.inverse($found, index=$index))",
        "$found",
        f'{EVALUATE} -k "add_up or four_devices"',
    ),
    Fault(
        "the places of answers are not permuted with the tokens",
        "Evaluator.answers",
        "$placed = self._placed($$args)\n$where = self._placed($batch | {'targets': $marks})['targets']",
        "$placed = self._placed($$args)\n$where = jax.device_put($marks, $placed['tokens'].sharding)",
        f"{EVALUATE} -k copies",
    ),
    Fault(
        "an answer is looked for a place late",
        "Prompts.batch",
        "$marks[:, self.length - self.value_tokens:] = np.arange(self.value_tokens)",
        "$marks[:, self.length - self.value_tokens + 1:] = np.arange(self.value_tokens - 1)",
        f"{EVALUATE} -k copies",
    ),
    Fault(
        "an answer is right if one of its tokens is",
        "measure_recall",
        "$hits.all",
        "$hits.any",
        f"{EVALUATE} -k half_right",
    ),
    Fault(
        "the probability of an answer is that of its first token",
        "measure_recall",
        "$score[:len($part)].astype(np.float64).sum(axis=1)",
        "$score[:len($part)].astype(np.float64)[:, 0]",
        f"{EVALUATE} -k copies",
    ),
    Fault(
        "depth goes from the end to the start",
        "Prompts._drawn",
        "$depth * (self.pairs - 1)",
        "(1 - $depth) * (self.pairs - 1)",
        f"{EVALUATE} -k a_prompt_holds",
    ),
    Fault(
        "a key may stand in the text too",
        "Prompts.make",
        "($windows == $asked).all(axis=1).sum() == 2",
        "($windows == $asked).all(axis=1).sum() >= 2",
        f"{EVALUATE} -k stands_nowhere_else",
    ),
    Fault(
        "the noise of training's router is in the evaluation",
        "recipe_of",
        "$recipe.model.experts.jitter = 0.0",
        "$recipe.model.experts.jitter += 0.0",
        f"{EVALUATE} -k only_what_keeps",
    ),
    Fault(
        "the run's own corpus counts as held out",
        "told_held_out",
        "$trained['corpus'] == $data.corpus.fingerprint",
        "$trained['corpus'] != $data.corpus.fingerprint",
        f"{EVALUATE} -k trained_on",
    ),
    Fault(
        "a stage goes on with the positions of the recipe",
        "curriculum:_applied",
        "replace($sections.model, **$model)",
        "$sections.model",
        f"{STAGES} -k positions",
    ),
    Fault(
        "the last stage keeps the positions of the one before",
        "stages_of",
        "$found.append(Stage($i + 1, len($given), $start, $until, _applied($sections, $stage, $where), $$own))",
        "$found.append(Stage($i + 1, len($given), $start, $until, _applied($found[-1].sections if $found "
        "else $sections, $stage, $where), $$own))",
        f"{STAGES} -k its_positions",
    ),
    Fault(
        "a stage goes on after its end",
        "Steps.run",
        "min($end, $begun.run.stage.until)",
        "$end",
        f"{STAGES} -k one_schedule",
    ),
    Fault(
        "the second stage reads the rows of the first",
        "Run.data_of",
        "self.datas[$stage.number - 1].resized(**sizes_of($stage.sections.data))",
        "self.datas[0].resized(**sizes_of(self.stages[0].sections.data))",
        f"{STAGES} -k one_schedule",
    ),
    Fault(
        "each stage has a schedule of its own",
        "curriculum:_applied",
        "replace($sections, optimizer=replace($sections.optimizer, **$rate), model=replace($sections.model, **$model), "
        "data=replace($sections.data, **$data), mesh=$stage.mesh or $sections.mesh, "
        "accumulation=$stage.accumulation or $sections.accumulation, curriculum=[])",
        "replace($sections, optimizer=replace($sections.optimizer, **$rate), model=replace($sections.model, **$model), "
        "data=replace($sections.data, **$data), mesh=$stage.mesh or $sections.mesh, "
        "accumulation=$stage.accumulation or $sections.accumulation, curriculum=[], "
        "run=replace($sections.run, steps=$stage.until or $sections.run.steps))",
        f"{STAGES} -k one_schedule",
    ),
    Fault(
        "a checkpoint at a stage's end is held against the next stage",
        "Run.check",
        "stage_of(self.stages, $step)",
        "stage_of(self.stages, $step + 1)",
        f"{STAGES} -k just_ended",
    ),
    Fault(
        "what a run has made may be planned anew",
        "check_history",
        "if $changed:\n    $$body",
        "if False:\n    $$body",
        f"{STAGES} -k may_not",
    ),
    Fault(
        "a stage's low frequencies are those of every scaling",
        "ROPE_SCALING",
        "{'rope_factor': 'factor', 'rope_original_length': 'original_length', 'rope_low': 'low', "
        "'rope_high': 'high', 'rope_attention_factor': 'attention_factor', 'rope_truncate': 'truncate'}",
        "{'rope_factor': 'factor', 'rope_original_length': 'original_length', 'rope_high': 'high', "
        "'rope_attention_factor': 'attention_factor', 'rope_truncate': 'truncate'}",
        "tests/test_model.py -k every_field",
    ),
    Fault(
        "a file's high frequency factor is not read",
        "read_rope",
        "$found[$key] = None if $value == $default else float($value)",
        "$found[$key] = None if $value == $default or $key == 'rope_high' else float($value)",
        "tests/test_weights.py -k its_files",
    ),
    Fault(
        "an evaluation has another EOS than the run",
        "told_held_out",
        "'eos' in $trained and $now[$key] != $trained[$key]",
        "False",
        f"{EVALUATE} -k trained_on",
    ),
    Fault(
        "a value is shown before it is spelled out",
        "measure_spelled",
        "[$row[:-$count] for ($row, _) in $asked]",
        "[$row for ($row, _) in $asked]",
        f"{EVALUATE} -k spelled",
    ),
    Fault(
        "a value is right where one of its tokens is",
        "measure_spelled",
        "$hits[$mine].all(axis=1)",
        "$hits[$mine].any(axis=1)",
        f"{EVALUATE} -k spelled",
    ),
    Fault(
        "texts come in the order in which they ended",
        "evaluation/generated:written",
        "[$results[$number] for $number in $numbers]",
        "[*$results.values()]",
        f"{EVALUATE} -k spelled",
    ),
    Fault(
        "an answer with more beside it is exact",
        "launch/prompts:Prompt.is_exact",
        "$text.strip().casefold() in {$one.strip().casefold() for $one in $self.answers}",
        "any($one.casefold() in $text.casefold() for $one in $self.answers)",
        f"{EVALUATE} -k generated",
    ),
    Fault(
        "answers go on after their end",
        "launch/answered:engine_of",
        "{'ends': $tokenizer.stop_ids, 'decode': $tokenizer.decode}",
        "{}",
        f"{EVALUATE} -k generated",
    ),
)
