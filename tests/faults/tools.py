"""Faults of benchmarks and the reference pages."""

from faults import Fault

FAULTS = (
    Fault(
        "Gluon: a kernel is launched with the warps asked for, without those of its workers",
        "kernels/toolchains/triton.py",
        'if (warps := int(threads[1]) // 32) != backend_options["num_warps"]:',
        'if (warps := int(threads[1]) // 32) < backend_options["num_warps"]:',
        "tests/test_toolchains.py -k gluon",
    ),
    Fault(
        "Triton: more shared memory than a block may have is taken",
        "kernels/toolchains/triton.py",
        "if made.shared_mem_bytes > limit:",
        "if made.shared_mem_bytes > 2 * limit:",
        "tests/test_toolchains.py -k shared_memory",
    ),
    Fault(
        "a wrong backend is timed all the same",
        "benchmarks/measure.py",
        'if contestant.ours and status == "wrong":',
        "if False:",
        "tests/test_benchmarks.py -k wrong_backend",
    ),
    Fault(
        "gradients of peers are not checked",
        "benchmarks/check.py",
        "        outputs, gradients = programs.outputs_and_gradients(",
        "        outputs, gradients = programs.outputs(inputs), {}\n        programs.outputs_and_gradients(",
        "tests/test_benchmarks.py",
    ),
    Fault(
        "docs: links to headings are not followed",
        "docs/__main__.py",
        '"myst_heading_anchors": 4,',
        '"myst_heading_anchors": 0,',
        "tests/test_docs.py -k nowhere",
    ),
    Fault(
        "docs: the functions of a page are forgotten",
        "docs/pages.py",
        "*map(function_section, functions), ",
        "",
        "tests/test_docs.py -k on_a_page",
    ),
    Fault(
        "docs: a sum over a split dim is not said",
        "docs/pages.py",
        "    if op.sum_dims:\n",
        "    if op.sum_dims and not op.weights:\n",
        "tests/test_docs.py -k facts",
    ),
    Fault(
        "what an earlier run left is listed",
        "tests/children/outside.py",
        '"os.listdir": lambda path: _read(path)',
        '"os.listdir": lambda path: None',
        "tests/test_isolation.py -k not_its_own",
    ),
    Fault(
        "a process that a test starts is not watched",
        "tests/children/sitecustomize.py",
        "outside.install()",
        "pass",
        "tests/test_isolation.py -k starts_are_watched",
    ),
    Fault(
        "a breach that the code under test caught is forgotten",
        "tests/isolation.py",
        "wrong = taken(breaches)",
        "wrong = []",
        "tests/test_isolation.py -k breach_fails",
    ),
    Fault(
        "a file may be left where tests start",
        "tests/isolation.py",
        "in sorted(start.iterdir()):",
        "in []:",
        "tests/test_isolation.py -k breach_fails",
    ),
    Fault(
        "a worker past the limit of memory passes",
        "tests/memory.py",
        "if self.messages and session.exitstatus",
        "if False and session.exitstatus",
        "tests/test_cost_of_tests.py -k limit_of_memory",
    ),
    Fault(
        "programs stay for as long as their functions",
        "tests/memory.py",
        '        sys.modules["jax"].clear_caches()\n',
        "",
        "tests/test_cost_of_tests.py -k that_are_kept",
    ),
    Fault(
        "the documentation is looked for in what runs left",
        "docs/pages.py",
        "within[:] = [",
        "_ = [",
        "tests/test_docs.py -k of_no_run",
    ),
)
