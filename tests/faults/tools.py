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
)
