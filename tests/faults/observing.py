"""Faults of what a run says while it trains, and of what an evaluation takes from its run."""

from faults import Fault

TESTS = "tests/test_while_it_trains.py"

FAULTS = (
    Fault(
        "an evaluation counts the data that comes around again",
        "HeldOut.measure",
        "batches_once($self.data, $self.batches)",
        "($self.data.batch(i) for i in range($self.batches))",
        f"{TESTS} -k other_tokenizer",
    ),
    Fault(
        "the last step is not evaluated",
        "HeldOut.due",
        "$step % $self.every == 0 or $step == $self.last",
        "$step % $self.every == 0",
        f"{TESTS} -k between_steps",
    ),
    Fault(
        "a state is evaluated again where the run goes on",
        "Steps._to",
        "$start if $done else None",
        "None",
        f"{TESTS} -k missing",
    ),
    Fault(
        "evaluations of steps that are made again stay",
        "cut_after",
        "isinstance($row, dict) and is_number($row.get('step'), int) and $row['step'] <= $step",
        "isinstance($row, dict)",
        f"{TESTS} -k missing",
    ),
    Fault(
        "what is held out trains a tokenizer of its own",
        "build_corpus",
        "make_tokenizer($name, $files, $cache, $asked) if isinstance($name, str) else $name",
        "make_tokenizer($name if isinstance($name, str) else 'bpe:300', $files, $cache, $asked)",
        f"{TESTS} -k other_tokenizer",
    ),
    Fault(
        "an evaluation uses the mesh of the first stage",
        "settings_at",
        "$found |= $mesh",
        "$found",
        f"{TESTS} -k stage_of_the_step",
    ),
    Fault(
        "a stage ends a step early",
        "recorded:_stage_at",
        "$step <= $until",
        "$step < $until",
        f"{TESTS} -k stage_of_the_step",
    ),
    Fault(
        "a variant on the command line loses to the run's keys",
        "with_settings_of_run",
        "$key not in $named and $key.partition('.')[0] not in $named",
        "$key not in $named",
        f"{TESTS} -k is_named",
    ),
    Fault(
        "a tracker that fails ends the run",
        "MetricsWriter._add",
        "del $self._trackers[$name]",
        "raise",
        f"{TESTS} -k trackers",
    ),
)
