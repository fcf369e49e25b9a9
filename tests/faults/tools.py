"""Faults of benchmarks and the reference pages."""

from faults import Fault

FAULTS = (
    Fault(
        "Gluon: a kernel is launched with the warps asked for, without those of its workers",
        "_compile_kernel",
        "($warps := (int($threads[1]) // 32)) != $backend_options['num_warps']",
        "($warps := (int($threads[1]) // 32)) < $backend_options['num_warps']",
        "tests/test_toolchains.py -k gluon",
    ),
    Fault(
        "Triton: more shared memory than a block may have is taken",
        "_compile_kernel",
        "$made.shared_mem_bytes > $limit",
        "$made.shared_mem_bytes > 2 * $limit",
        "tests/test_toolchains.py -k shared_memory",
    ),
    Fault(
        "a wrong backend is timed all the same",
        "measure:_check",
        "$contestant.ours and $status == 'wrong'",
        "False",
        "tests/test_benchmarks.py -k wrong_backend",
    ),
    Fault(
        "gradients of peers are not checked",
        "errors",
        "$outputs, $gradients = $programs.outputs_and_gradients($inputs, "
        "$programs.load_cotangents($reference.cotangents))",
        "$outputs, $gradients = ($programs.outputs($inputs), {})\n"
        "$programs.outputs_and_gradients($inputs, $programs.load_cotangents($reference.cotangents))",
        "tests/test_benchmarks.py",
    ),
    Fault("docs: links to headings are not followed", "CONFIGURATION", "4", "0", "tests/test_docs.py -k nowhere"),
    Fault(
        "docs: the functions of a page are forgotten",
        "operation_page",
        "[$title, '## Functions', *map(function_section, $functions), '## Meaning', $body.strip(), '## Contracts']",
        "[$title, '## Functions', '## Meaning', $body.strip(), '## Contracts']",
        "tests/test_docs.py -k on_a_page",
    ),
    Fault(
        "docs: a sum over a split dim is not said",
        "sharding_in_words",
        "if $op.sum_dims:\n    $$body",
        "if $op.sum_dims and (not $op.weights):\n    $$body",
        "tests/test_docs.py -k facts",
    ),
    Fault(
        "what an earlier run left is listed",
        "tests/children/outside:_hook",
        "_CHECKS.get($event)",
        "_CHECKS.get($event) if $event != 'os.listdir' else None",
        "tests/test_isolation.py -k not_its_own",
    ),
    Fault(
        "a process that a test starts is not watched",
        "tests/children/sitecustomize:",
        "outside.install()",
        "pass",
        "tests/test_isolation.py -k starts_are_watched",
    ),
    Fault(
        "a breach that the code under test caught is forgotten",
        "tests/isolation:stays_inside",
        "taken($breaches)",
        "[]",
        "tests/test_isolation.py -k breach_fails",
    ),
    Fault(
        "a file may be left where tests start",
        "tests/isolation:stays_inside",
        "sorted($start.iterdir())",
        "[]",
        "tests/test_isolation.py -k breach_fails",
    ),
    Fault(
        "a worker past the limit of memory passes",
        "tests/memory:Memory.pytest_sessionfinish",
        "self.messages and $session.exitstatus == pytest.ExitCode.OK",
        "False",
        "tests/test_cost_of_tests.py -k limit_of_memory",
    ),
    Fault(
        "programs stay for as long as their functions",
        "tests/memory:drop_programs",
        "sys.modules['jax'].clear_caches()",
        "",
        "tests/test_cost_of_tests.py -k that_are_kept",
    ),
    Fault(
        "the documentation is looked for in what runs left",
        "pages:documents",
        "$within[:]",
        "_",
        "tests/test_docs.py -k of_no_run",
    ),
)
