"""Faults of command lines, of recipes of the user's own, of sweeps, and of the page about a run."""

from faults import Fault

TESTS, PAGE = "tests/test_commands.py", "tests/test_report.py"
CHART, FOLDER, HTML, CONTENTS = (f"launch/reporting/{name}.py" for name in ("chart", "folder", "html", "contents"))

FAULTS = (
    Fault(
        "a recipe takes back what a variant on the command line says",
        "_check_order",
        "$wanted != $found",
        "False",
        f"{TESTS} -k 'named or same_recipe'",
    ),
    Fault(
        "integers of any length",
        "_check_integers",
        "isinstance($found, int) and (not -2 ** 63 <= $found < 2 ** 63)",
        "False",
        f"{TESTS} -k flags_that_are_wrong",
    ),
    Fault(
        "a variant of the user's hides behind the project's",
        "_check_folder",
        "if $both:\n    $$body",
        "if False:\n    $$body",
        f"{TESTS} -k of_the_user_is_named",
    ),
    Fault(
        "a printed recipe pins the place where it is run",
        "schema:text_of",
        "del $composed['cluster']",
        "",
        f"{TESTS} -k same_recipe",
    ),
    Fault(
        "a printed recipe cannot be one",
        "_HEAD",
        "_HEAD = '# @package _global_\\n# Composed by python -m launch.train --cfg job; saved as "
        "DIR/recipe/NAME.yaml it is recipe=NAME with --config-dir DIR.\\n# The section cluster is left out: it describes "
        "where a run runs.\\n'",
        "_HEAD = '\\n# Composed by python -m launch.train --cfg job; saved as DIR/recipe/NAME.yaml it is "
        "recipe=NAME with --config-dir DIR.\\n# The section cluster is left out: it describes where a "
        "run runs.\\n'",
        f"{TESTS} -k same_recipe",
    ),
    Fault(
        "another host looks for the folder where it stands itself",
        "_folder",
        "Path($given).expanduser().absolute",
        "Path($given).expanduser",
        f"{TESTS} -k names_the_folder_absolutely",
    ),
    Fault(
        "a flag that a command has no use for is dropped",
        "arguments:read",
        "$given and (not $every)",
        "False",
        f"{TESTS} -k no_flag_of_another",
    ),
    Fault(
        "two runs of a sweep share a folder",
        "arguments:_name",
        "$plain == $whole",
        "True",
        f"{TESTS} -k runs_of_a_sweep",
    ),
    Fault(
        "a sweep ends with the code of its last run",
        "sweep",
        "($code for $code in $codes if $code)",
        "($code for $code in $codes[-1:] if $code)",
        f"{TESTS} -k how_a_sweep_ends",
    ),
    Fault(
        "a run that fails ends the sweep",
        "sweep",
        "$codes[-1] in _ENDS_ALL",
        "$codes[-1]",
        f"{TESTS} -k how_a_sweep_ends",
    ),
    Fault(
        "a sweep that was told to stop starts the next run",
        "_ENDS_ALL",
        "(PREEMPTED, HOST_LOST, ABORTED)",
        "(HOST_LOST, ABORTED)",
        f"{TESTS} -k how_a_sweep_ends",
    ),
    Fault(
        "a run of a sweep hears no signal",
        "_passed_on.note",
        "$now.process.send_signal($number)",
        "pass",
        f"{TESTS} -k told_to_stop",
    ),
    Fault(
        "a Ctrl-C reaches a run twice",
        "Job.start",
        "subprocess.Popen($$args, **$$args2, process_group=0)",
        "subprocess.Popen($$args, **$$args2)",
        f"{TESTS} -k launcher_alone",
    ),
    Fault(
        "Ctrl-C of a command that cannot go on says that it can",
        "run_command",
        "('stopped by SIGINT', INTERRUPTED)",
        "('stopped by SIGINT', PREEMPTED)",
        f"{TESTS} -k frame_of_a_command",
    ),
    Fault(
        "what a file says is taken for HTML",
        "html:escaped",
        "html.escape($text)",
        "$text",
        f"{PAGE} -k hostile",
    ),
    Fault(
        "an attribute ends where a file wants it to",
        "tag",
        "html.escape(str($value))",
        "$value",
        f"{PAGE} -k 'hostile or as_people_write'",
    ),
    Fault(
        "a peak between two places of a curve is lost",
        "Series.reduced",
        "self.high[$good]",
        "self.middle[$good] * 0 + self.middle[$good].mean()",
        f"{PAGE} -k no_peak_is_lost",
    ),
    Fault(
        "a step without a number is drawn over",
        "_path",
        "$joined = False",
        "",
        f"{PAGE} -k where_their_numbers_are",
    ),
    Fault(
        "damaged lines are left out silently",
        "_read_rows",
        "$bad.append($at)",
        "",
        f"{PAGE} -k missing_or_damaged",
    ),
    Fault(
        "a summary of an earlier stop passes for that of the run",
        "folder:open_folder",
        "$run.rows and $found and ($found.get('steps') != $run.rows[-1]['step'])",
        "False",
        f"{PAGE} -k missing_or_damaged",
    ),
    Fault(
        "checkpoints in a bucket are missed",
        "folder:open_folder",
        "$run.rows and (not $run.kept_in) and (not ($path / 'checkpoints').is_dir())",
        "$run.rows and (not ($path / 'checkpoints').is_dir())",
        f"{PAGE} -k kept_elsewhere",
    ),
    Fault(
        "a run that is going on is called finished",
        "RunFolder.status",
        "self.summary.get('steps') == $last",
        "$last",
        f"{PAGE} -k going_on",
    ),
    Fault(
        "what differs from the defaults is not marked",
        "contents:_line",
        "$values[0] != $usual",
        "False",
        f"{PAGE} -k differs_from_the_defaults",
    ),
    Fault(
        "a key that every stage of a curriculum has of its own is not used, without a word",
        "_check_stages",
        "is_of($name, $over)",
        "$name in $over",
        "tests/test_curriculum.py -k has_of_its_own",
    ),
)
