"""The code in the project's documents runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [p for p in sorted(ROOT.rglob("*.md")) if "```python" in p.read_text() and ".venv" not in p.parts]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_python_blocks_run(path):
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.S)
    # A module with a name of its own, so that contracts defined in a document belong to no room.
    space = {"__name__": "document"}
    exec(compile("\n".join(blocks), str(path), "exec"), space)


def test_the_support_table_is_what_the_contracts_say():
    from kernels.__main__ import BEGIN, END, table

    written = (ROOT / "README.md").read_text().partition(BEGIN)[2].partition(END)[0]
    assert written.strip() == table(), "run: python -m kernels --write"
