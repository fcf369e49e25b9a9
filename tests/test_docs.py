"""The documentation builds without a warning, has a page of every operation, and its examples run."""

import doctest
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import ejdist
import kernels
from docs import pages as pages_module
from docs.pages import all_pages, documents, sharding_in_words
from docs.text import escaped, first_sentence, markdown
from launch import plan

PUBLIC = kernels.public_functions()


@pytest.fixture(scope="module")
def pages():
    return all_pages()


@pytest.fixture
def build():
    pytest.importorskip("myst_parser", reason="the documentation is built with Sphinx: pip install -e '.[docs]'")
    from docs.__main__ import build

    return build


@pytest.mark.slow
def test_it_builds_and_no_link_leads_nowhere(build, pages, tmp_path):
    assert build(tmp_path, pages) == []
    assert {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.html")} >= {
        name.replace(".md", ".html") for name in pages
    }
    text = (tmp_path / "kernels" / "ops" / "mean_pooling" / "README.html").read_text()
    assert 'id="mean_pooling"' in text and "B, T, D" in text and "triton_gpu" in text
    assert "docs/tutorials/long_context.html" in text and "site.css" in text, "the navigation, on every page"
    assert "README.html" in (tmp_path / "index.html").read_text() and (tmp_path / "_static" / "site.css").exists()


def test_the_navigation_leads_from_the_readme_to_every_page_once(pages):
    trees = re.findall(r"```\{toctree\}\n:hidden:\n:caption: (.*?)\n\n(.*?)\n```", pages["README.md"], re.DOTALL)
    listed = {caption: names.split("\n") for caption, names in trees}
    assert sorted(name for names in listed.values() for name in names) == sorted(set(pages) - {"README.md"})
    assert listed["Tutorials"][0] == "docs/tutorials/README.md" and len(listed["Tutorials"]) == 6
    assert listed["Operations"][0] == "operations.md" and "kernels/ops/mean_pooling/README.md" in listed["Operations"]
    assert {"docs/CALL.md", "docs/GLOSSARY.md"} == set(listed["Terms and calls"]) and "CHANGELOG.md" in listed[
        "Project"
    ]


def test_pages_are_of_the_project_and_of_no_run(tmp_path, monkeypatch):
    for name in (
        "README.md",
        "outputs/run/README.md",
        "kernels/README.md",
        ".venv/a/README.md",
        "kernels/outputs/a.md",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(pages_module, "ROOT", tmp_path)
    assert documents() == ["README.md", "kernels/README.md", "kernels/outputs/a.md"]


def test_a_link_that_leads_nowhere_fails_the_build(build, tmp_path):
    contents = "```{toctree}\nb.md\n```\n"
    warnings = build(
        tmp_path, {"README.md": f"# a\n\n[one](nowhere.md), [two](b.md#no-such)\n\n{contents}", "b.md": "# b\n"}
    )
    assert len(warnings) == 2 and "nowhere.md" in warnings[0] and "no-such" in warnings[1]


def test_words_that_mean_nothing_build_and_print_nothing(monkeypatch, tmp_path, capsys):
    from docs.__main__ import main as docs
    from kernels.__main__ import main as table

    monkeypatch.chdir(tmp_path)
    for command, wrong in ((docs, ["--out"]), (docs, ["a", "b"]), (table, ["--wrte"]), (table, ["rms_norm"])):
        assert command(wrong) == 2 and command(["--help"]) == 0
        said = capsys.readouterr()
        assert f"cannot read '{' '.join(wrong)}'" in said.err and said.out.startswith("`python -m ")
    assert not list(tmp_path.iterdir())


def test_every_public_name_is_on_a_page(pages):
    for name in ejdist.operations.FUNCTIONS:
        assert sum(f"\n### {escaped(name)}\n" in text for text in pages.values()) == 1, name
        assert f"[`{name}`](" in pages["operations.md"]
    for op in kernels.operations().values():
        assert sum(f"\n### Operation {escaped(op.name)}\n" in text for text in pages.values()) == 1, op.name
    for name in {*kernels.__all__, *ejdist.__all__, *ejdist.ops.__all__, *ejdist.types.__all__}:
        thing = getattr(ejdist, name, None) or getattr(kernels, name, None) or getattr(ejdist.ops, name)
        if callable(thing) and name not in ejdist.operations.FUNCTIONS and name not in ejdist.operations.MODULES:
            assert f"\n### {escaped(thing.__name__)}\n" in pages["api.md"] or name in pages["api.md"], name


def test_facts_of_sharding_are_all_said():
    said = sharding_in_words(kernels.operations()["gated_mlp"])
    assert "`lead` may be split: each device computes its part" in said and "every output is a sum over it" in said
    assert "`down`, `gate`, `up` may be stored split" in said and "`D` must be whole" in said
    attention = sharding_in_words(kernels.operations()["flash_attention"])
    assert "`N` and `K` are split alike or not at all" in attention and "by `ejdist.ring_attention`" in attention


def test_docstrings_as_markdown():
    doc = """Returns a [*lead] of `x_y`. And more.

    Args:
      x: a_b,
        goes on.
      left, right: both.

    >>> 1 + 1
    2
    """
    assert markdown(doc) == (
        "Returns a \\[\\*lead\\] of `x_y`. And more.\n\n**Args**\n\n- **x**: a\\_b, goes on.\n- **left, right**: both.\n\n"
        "```pycon\n>>> 1 + 1\n2\n```"
    )
    assert first_sentence(doc) == "Returns a [*lead] of `x_y`."


class Numbers(doctest.OutputChecker):
    """Compares numbers as numbers: their last digit is the compiler's."""

    def check_output(self, want, got, optionflags):
        number = r"-?\d+(?:\.\d*)?(?:e[+-]?\d+)?"
        texts = [re.sub(rf"{number}|\s", "", text) for text in (want, got)]
        wanted, found = (np.array(re.findall(number, text), float) for text in (want, got))
        return texts[0] == texts[1] and wanted.shape == found.shape and np.allclose(wanted, found, atol=1e-5)


# Functions whose kernels have an example that is quick: another name of an operation, or one that is built on it.
SAME = {"ragged_gated_delta_rule", "ragged_page_attention_v3", "performer_attention", "mixture_of_attention_heads"}


@pytest.mark.parametrize(
    "function",
    [pytest.param(f, id=name, marks=[pytest.mark.slow] * (name in SAME)) for name, f in PUBLIC.items()],
)
def test_the_example_of_a_public_function_runs(function):
    name = function.__name__
    example = doctest.DocTestParser().get_doctest(function.__doc__, {name: function}, name, None, None)
    assert example.examples, "must have an example, `>>>`"
    said: list[str] = []
    doctest.DocTestRunner(Numbers()).run(example, out=said.append)
    assert not said, "".join(said)


@pytest.mark.slow  # two plans of 8 billion parameters
def test_the_plans_of_the_hybrid_tutorial_are_what_its_commands_print(capsys):
    said = (
        Path(pages_module.__file__)
        .with_name("tutorials")
        .joinpath("hybrid.md")
        .read_text()
        .split("## On the real machine")[1]
    )
    commands, shown = (re.search(rf"```{kind}\n(.*?)```", said, re.DOTALL)[1] for kind in ("bash", "text"))
    for command in commands.replace("\\\n", " ").strip().splitlines():
        plan.main(shlex.split(command)[3:])
    printed = capsys.readouterr().out.splitlines()
    wanted = [line for line in shown.strip().splitlines() if line != "..."]
    assert len(wanted) == 4 and [line for line in printed if line in wanted] == wanted
