"""`python -m kernels`: prints which backend supports what, as the table of the README. `--write` puts it there."""

from __future__ import annotations

import sys
from pathlib import Path

from kernels import operations

BEGIN, END = "<!-- support: begin -->", "<!-- support: end -->"


def table() -> str:
    """Returns the support table in Markdown, one row for each operation and backend, read from the contracts."""
    lines = ["| operation | backend | runs on | dtypes | backward | refuses |", "|---|---|---|---|---|---|"]
    for op in operations().values():
        for row in op.support():
            refused = ", ".join(row["refused"]) or "nothing"
            dtypes = ", ".join(d.replace("float", "f").replace("bf", "bf") for d in row["dtypes"])
            backward = "native" if row["backward"] else "none"
            where = ", ".join(row["platforms"])
            lines.append(f"| `{row['op']}` | {row['backend']} | {where} | {dtypes} | {backward} | {refused} |")
        for name, reason in op.unavailable().items():
            lines.append(f"| `{op.name}` | {name} | not available here: {reason} | | | |")
    return "\n".join(lines)


def main() -> int:
    if "--write" not in sys.argv:
        print(table())
        return 0
    path = Path("README.md")
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
