"""The commands of the documents: each composes, names files that are there, and those of the tutorials run."""

import os
import re

import pytest
from documents import ROOT, TUTORIALS, Page, blocks_of, commands_of, missing_line, run_page

from docs.pages import documents

WITH_COMMANDS = [
    name for name in documents() if any(b.language in ("bash", "sh") for b in blocks_of((ROOT / name).read_text()))
]


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_every_command_of_a_document_composes(name, tmp_path, monkeypatch):
    """Data, devices and weights need not be there, but in a tutorial, where commands make what later ones read."""
    monkeypatch.chdir(tmp_path)
    page = Page(complete=ROOT / name in TUTORIALS)
    page.check((ROOT / name).read_text())
    assert page.checked, "no command is in it"


def test_the_documents_that_a_new_user_reads_have_commands():
    assert {"README.md", "launch/README.md"} <= set(WITH_COMMANDS) and len(TUTORIALS) == 5
    assert {path.relative_to(ROOT).as_posix() for path in TUTORIALS} <= set(WITH_COMMANDS)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)
@pytest.mark.slow
def test_a_tutorial_runs_from_top_to_bottom(path, tmp_path):
    run_page(path, tmp_path)


def test_every_tutorial_is_in_their_list_and_in_the_readme():
    for file, folder in (("docs/tutorials/README.md", ""), ("README.md", "docs/tutorials/")):
        linked = re.findall(rf"\]\({folder}(\w+\.md)\)", (ROOT / file).read_text())
        assert {path.name for path in TUTORIALS} <= set(linked), file


# -- the mechanism ---------------------------------------------------------------------------------------------------------


def shell(*lines):
    return "```bash\n" + "\n".join(lines) + "\n```\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (shell("python -m launch.train recipe=moe model.expert.num=4"), "unknown key 'model.expert.num'"),
        (shell("python -m launch.train -m recipe=moe run.seed=1,2 optimizer.lr=1"), "unknown key 'optimizer.lr'"),
        (shell("python -m launch.train recipe=moe data.global_batch=-1"), "data.global_batch"),
        (shell("ls && python -m launch.plan topology=v5p:2x2x1 devises=4 recipe=moe"), "did you mean 'devices'"),
        (shell("python -m launch.plan topology=v5p:2x2x1 recipe=moe model=9b"), "model=9b is unknown"),
        (shell("python -m launch.evaluate run.dir=nowhere"), "nothing before has made nowhere"),
        (shell("python -m launch.export run.dir=. too=x"), "cannot read 'too=x'"),
        (shell("python -m launch.report run.dir=nowhere"), "nothing before has made nowhere"),
        (shell("python -m launch.tokenize source='a/*.txt' to=t"), r"nothing before has made a/\*.txt"),
        (shell("python -m launch.train data=files data.source=a.txt"), "nothing before has made a.txt"),
        (shell("python -m launch.slurm nodes=2 node=3 recipe=moe"), "node"),
        (shell("python -m launch.rehearse fault=none"), "fault=none is unknown"),
        (shell("python -m launch.trian recipe=moe"), "launch.trian is not a command"),
        (shell("python mine.py"), "nothing before has made mine.py"),
        (shell("python -m no_such_module"), "no module no_such_module"),
        (shell("python - <<'EOF'", "print(", "EOF"), "was never closed"),
        (shell("python -m launch.train run.seed=range(0,3)"), "syntax error"),
        (shell("pyhton -m launch.train"), "nothing checks a command 'pyhton'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_command_is_seen(text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, AssertionError, SyntaxError), match=said):
        Page(complete=True).check(text)


def test_commands_for_another_machine_compose_and_need_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = "```sh\npython -m launch.train model=hf model.init_from=models/M data=files data.source=/mnt/a.txt{}\n```\n"
    Page(complete=True).check(there.format(" run.dir=/mnt/b"))
    with pytest.raises(ValueError, match=r"unknown key 'run\.dri'"):
        Page(complete=True).check(there.format(" run.dri=/mnt/b"))


def test_what_a_command_makes_later_ones_may_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Page(complete=True)
    page.check(
        "```python\n# own.py\nprint(1)\n```\n"
        + shell("python own.py", "cat > a.txt <<'EOF'", "some 'text", "EOF")
        + shell("python -m launch.train recipe=moe data=files data.source='*.txt' \\", "  run.dir=runs/a  # a comment")
        + shell("python -m launch.export run.dir=runs/a to=b", "X=1 python -m launch.train model=hf:b data.tokenizer=b")
    )
    assert (
        page.checked == ["python", "cat", "train", "export", "train"]
        and (tmp_path / "a.txt").read_text() == "some 'text\n"
    )
    assert [c.words for c in commands_of("a 'b\nc' && d | e > f; g")][:2] == [["a", "b\nc"], ["d"]]


def test_a_page_that_runs_is_held_against_what_it_shows(tmp_path, monkeypatch):
    shown = "loss 5.2 -> 4.1 in 30 ...\n...\nwritten to a\n"
    assert missing_line(shown, "x\nloss 6 ->  3.25 in 1,000 steps\ny\nwritten to a\n") is None
    assert missing_line(shown, "written to a\nloss 6 -> 3 in 9 steps\n") == "written to a"
    assert missing_line(shown, "loss 6 -> 3\nwritten to a\n") == "loss 5.2 -> 4.1 in 30 ..."
    page = ROOT / "docs" / "tutorials" / "made.md"

    def run(name, text):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(type(page), "read_text", lambda self: text)
        run_page(page, tmp_path / name)

    file = "```python\n# own.py\nprint('total', 3)\n```\n"
    run(
        "a",
        file + shell("python own.py > said", "cat said", "ls examples") + "```text\ntotal 4\ncustom_trainer.py\n```\n",
    )
    with pytest.raises(AssertionError, match=r"made.md, line \d+: this is not printed: sum 3"):
        run("b", file + shell("python own.py") + "```text\nsum 3\n```\n")
    with pytest.raises(AssertionError, match="exit code 1"):
        run("c", shell("false", "echo 1"))
    assert "XLA_FLAGS" in os.environ, "which the commands of a page do not see"
    run("d", shell('echo "flags ${XLA_FLAGS:-none}"') + "```text\nflags none\n```\n")
