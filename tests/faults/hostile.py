"""Faults of certificates, of compiler flags, and of what files and reports of others may do."""

from faults import Fault

TLS, FLAGS, HOSTILE = "tests/test_tls.py", "tests/test_flags.py", "tests/test_hostile.py"

FAULTS = (
    Fault(
        "a certificate of the authority is enough, whosever it is",
        "tls:is_ours",
        "$kind == 'URI' and $value.startswith(URI)",
        "True",
        f"{TLS} -k asks_for_a_certificate",
    ),
    Fault(
        "the door asks for no certificate",
        "tls:context",
        "($$before, ssl.CERT_REQUIRED)",
        "($$before, ssl.CERT_NONE)",
        f"{TLS} -k processes_of_the_run",
    ),
    Fault(
        "JAX's own service takes whoever reaches it",
        "of_jax",
        "$folder is None",
        "True",
        f"{TLS} -k jax_asks",
    ),
    Fault(
        "a flag of another version aborts the compiler",
        "flags:check_known",
        "[$name for $name in $names if not _has($library, $name)]",
        "[]",
        f"{FLAGS} -k 'not_known or knows'",
    ),
    Fault(
        "hosts compile what the first has kept",
        "options:shared_cache",
        "[assigned('run.compile_cache', $$folder)]",
        "[]",
        f"{FLAGS} -k launchers_print",
    ),
    Fault(
        "a weight map reads any file",
        "read_folder",
        "$file.startswith(('/', '~')) or '..' in Path($file).parts",
        "False",
        f"{HOSTILE} -k stays_in_its_folder",
    ),
    Fault(
        "a pipe in the place of weights is waited for",
        "_check_regular",
        "isinstance($path, Path) and $path.exists() and (not $path.is_file())",
        "False",
        f"{HOSTILE} -k is_no_file",
    ),
    Fault(
        "an alias counts as one value",
        "too_many_values",
        "add($sizes.get($event.anchor, 1))",
        "add(1)",
        f"{HOSTILE} -k bomb",
    ),
    Fault(
        "a recipe takes a token from the environment",
        "secret_in",
        "is_secret($name)",
        "False",
        f"{HOSTILE} -k no_secret",
    ),
    Fault(
        "a panic of a library is no error",
        "errors:panicked",
        "type($error).__name__ == 'PanicException'",
        "False",
        f"{HOSTILE} -k panic",
    ),
    Fault(
        "a failure that claims code 0 is an end that is well",
        "exit_code_of",
        "isinstance($error, HostLost) and $error.code",
        "isinstance($error, HostLost) and $error.code is not None",
        f"{HOSTILE} -k not_code_0",
    ),
)
