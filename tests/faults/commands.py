"""Faults of command lines, of recipes of the user's own, of sweeps, and of the page about a run."""

from faults import Fault

ARGUMENTS, SCHEMA, SWEEP, ERRORS = "recipes/arguments.py", "recipes/schema.py", "launch/sweep.py", "launch/errors.py"
TESTS = "tests/test_commands.py"

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
        f"{TESTS} -k 'how_a_sweep_ends or told_to_stop'",
    ),
    Fault(
        "Ctrl-C of a command that cannot go on says that it can",
        ERRORS,
        '= ("stopped by SIGINT", INTERRUPTED)',
        '= ("stopped by SIGINT", PREEMPTED)',
        f"{TESTS} -k frame_of_a_command",
    ),
)
