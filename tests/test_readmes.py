"""The code in the project's documents runs, and the tables in them are what the code says."""

import pytest
from documents import ROOT, blocks_of

from docs.pages import documents
from kernels.__main__ import BEGIN, END, readmes, table


def python_of(path):
    """Returns the blocks of Python of a document, but for files that its commands use (tests/test_documents.py)."""
    return [b.text for b in blocks_of(path.read_text()) if b.language == "python" and not b.file]


DOCUMENTS = [ROOT / name for name in documents() if python_of(ROOT / name)]


# Its blocks compile for long; what they show has tests of its own.
LONG = (ROOT / "kernels" / "framework" / "README.md",)


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.slow] * (p in LONG)) for p in DOCUMENTS],
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_python_blocks_run(path):
    # A module with a name of its own, so that contracts defined in a document belong to no folder.
    space = {"__name__": "document"}
    exec(compile("\n".join(python_of(path)), str(path), "exec"), space)


@pytest.mark.parametrize("path", readmes(), ids=lambda p: p.parent.name)
def test_the_support_table_is_what_the_backends_registered(path):
    written = path.read_text().partition(BEGIN)[2].partition(END)[0]
    assert written.strip() == table(readmes()[path]), "run: python -m kernels --write"


def test_every_folder_of_operations_has_its_table():
    folders = {p.parent.name for p in (ROOT / "kernels" / "ops").glob("*/contract.py")}
    assert {p.parent.name for p in readmes()} == folders
