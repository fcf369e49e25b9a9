"""Faults of command lines, of recipes of the user's own, of sweeps, and of the page about a run."""

from faults import Fault

ARGUMENTS, SCHEMA, SWEEP, ERRORS = "recipes/arguments.py", "recipes/schema.py", "launch/sweep.py", "launch/errors.py"
TESTS, PAGE = "tests/test_commands.py", "tests/test_report.py"
CHART, FOLDER, HTML, CONTENTS = (f"launch/reporting/{name}.py" for name in ("chart", "folder", "html", "contents"))

FAULTS = (
    Fault(
        "a recipe takes back what a variant on the command line says",
        SCHEMA,
        "            if wanted != found and key not in given:",
        "            if False:",
        f"{TESTS} -k 'named or same_recipe'",
    ),
    Fault(
        "a variant of the user's hides behind the project's",
        SCHEMA,
        "    if both:",
        "    if False:",
        f"{TESTS} -k of_the_user_is_named",
    ),
    Fault(
        "a printed recipe pins the place where it is run",
        SCHEMA,
        '        del composed["cluster"]\n',
        "",
        f"{TESTS} -k same_recipe",
    ),
    Fault(
        "a printed recipe cannot be one",
        SCHEMA,
        '_HEAD = """# @package _global_\n',
        '_HEAD = """\n',
        f"{TESTS} -k same_recipe",
    ),
    Fault(
        "another host looks for the folder where it stands itself",
        ARGUMENTS,
        "folder = Path(given).expanduser().absolute()",
        "folder = Path(given).expanduser()",
        f"{TESTS} -k names_the_folder_absolutely",
    ),
    Fault(
        "a flag that a command has no use for is dropped",
        ARGUMENTS,
        "    if given and not every:",
        "    if False:",
        f"{TESTS} -k no_flag_of_another",
    ),
    Fault(
        "two runs of a sweep share a folder",
        ARGUMENTS,
        'return plain if plain == whole else f"{plain}-',
        'return plain if True else f"{plain}-',
        f"{TESTS} -k runs_of_a_sweep",
    ),
    Fault(
        "a sweep ends with the code of its last run",
        SWEEP,
        "return next((code for code in codes if code), ",
        "return next((code for code in codes[-1:] if code), ",
        f"{TESTS} -k how_a_sweep_ends",
    ),
    Fault(
        "a run that fails ends the sweep",
        SWEEP,
        "            if codes[-1] in _ENDS_ALL:",
        "            if codes[-1]:",
        f"{TESTS} -k how_a_sweep_ends",
    ),
    Fault(
        "a sweep that was told to stop starts the next run",
        SWEEP,
        "_ENDS_ALL = (PREEMPTED, HOST_LOST, ABORTED)",
        "_ENDS_ALL = (HOST_LOST, ABORTED)",
        f"{TESTS} -k how_a_sweep_ends",
    ),
    Fault(
        "a run of a sweep hears no signal",
        SWEEP,
        "            now.process.send_signal(number)\n\n",
        "            pass\n\n",
        f"{TESTS} -k told_to_stop",
    ),
    Fault(
        "a Ctrl-C reaches a run twice",
        "launch/processes.py",
        ", process_group=0",
        "",
        f"{TESTS} -k launcher_alone",
    ),
    Fault(
        "Ctrl-C of a command that cannot go on says that it can",
        ERRORS,
        '= ("stopped by SIGINT", INTERRUPTED)',
        '= ("stopped by SIGINT", PREEMPTED)',
        f"{TESTS} -k frame_of_a_command",
    ),
    Fault(
        "what a file says is taken for HTML",
        HTML,
        "        return html.escape(text)",
        "        return text",
        f"{PAGE} -k hostile",
    ),
    Fault(
        "an attribute ends where a file wants it to",
        HTML,
        '="{html.escape(str(value))}"',
        '="{value}"',
        f"{PAGE} -k 'hostile or as_people_write'",
    ),
    Fault(
        "a peak between two places of a curve is lost",
        CHART,
        "np.maximum.at(high, index[good], self.high[good])",
        "np.maximum.at(high, index[good], self.middle[good] * 0 + self.middle[good].mean())",
        f"{PAGE} -k no_peak_is_lost",
    ),
    Fault(
        "a step without a number is drawn over",
        CHART,
        "        if not math.isfinite(py):\n            joined = False\n            continue\n",
        "        if not math.isfinite(py):\n            continue\n",
        f"{PAGE} -k where_their_numbers_are",
    ),
    Fault(
        "damaged lines are left out silently",
        FOLDER,
        "            bad.append(at)\n",
        "",
        f"{PAGE} -k missing_or_damaged",
    ),
    Fault(
        "a summary of an earlier stop passes for that of the run",
        FOLDER,
        'elif run.rows and found and found.get("steps") != run.rows[-1]["step"]:',
        "elif False:",
        f"{PAGE} -k missing_or_damaged",
    ),
    Fault(
        "checkpoints in a bucket are missed",
        FOLDER,
        "if run.rows and not run.kept_in and",
        "if run.rows and",
        f"{PAGE} -k kept_elsewhere",
    ),
    Fault(
        "a run that is going on is called finished",
        FOLDER,
        'if self.summary.get("steps") == last:',
        "if last:",
        f"{PAGE} -k going_on",
    ),
    Fault(
        "what differs from the defaults is not marked",
        CONTENTS,
        "changed = values[0] != usual if len(runs) == 1",
        "changed = False if len(runs) == 1",
        f"{PAGE} -k differs_from_the_defaults",
    ),
)
