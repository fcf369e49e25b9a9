"""`python -m docs [FOLDER]`: builds the documentation as HTML; FOLDER is by default outputs/docs. Fails on any warning, such as
a link that leads nowhere.

What there is to read is made by `docs/pages.py` from the sources. Needs `pip install -e '.[docs]'`.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

from docs.pages import FRONT, ROOT, all_pages, files_linked_to

# MyST reads Markdown by CommonMark's rules, as GitHub does, so that a README looks the same in both.
CONFIGURATION = {
    "project": "ejdist",
    "root_doc": FRONT.removesuffix(".md"),
    "extensions": ["myst_parser"],
    "html_theme": "alabaster",
    "html_theme_options": {"page_width": "900px", "sidebar_width": "260px", "fixed_sidebar": True},
    "html_sidebars": {"**": ["about.html", "searchbox.html", "navigation.html"]},
    "html_static_path": [str(ROOT / "docs" / "static")],
    "html_css_files": ["site.css"],
    "html_show_sourcelink": False,
    "html_show_copyright": False,
    "myst_heading_anchors": 4,  # so that a link to a heading is checked
}


def build(out: Path, pages: Mapping[str, str] | None = None) -> list[str]:
    """Writes HTML into `out` and returns what Sphinx warned of; with a warning, it is not to be published.

    Args:
      pages: path -> Markdown; default: all there are.
    """
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace

    pages = all_pages() if pages is None else pages
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        for name, text in pages.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_text(text)
        for path in files_linked_to(pages):
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).write_bytes((ROOT / path).read_bytes())
        with contextlib.redirect_stderr(said), warnings.catch_warnings(), docutils_namespace():
            warnings.simplefilter(
                "ignore"
            )  # of Python: what Sphinx's next version will drop is for its extensions to mend
            app = Sphinx(source, None, out, Path(folder) / "doctrees", "html", CONFIGURATION, status=None, warning=said)
            app.build(force_all=True)
    # Where a browser and a server begin.
    front = FRONT.replace(".md", ".html")
    (out / "index.html").write_text(
        f'<!doctype html><meta http-equiv="refresh" content="0; url={front}"><a href="{front}">ejdist</a>'
    )
    return [line.replace(f"{source}/", "") for line in said.getvalue().splitlines() if line.strip()]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code of the command."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    if len(argv) > 1 or any(word.startswith("-") or not word for word in argv):
        print(f"cannot read {' '.join(argv)!r}: write python -m docs [FOLDER]", file=sys.stderr)
        return 2
    out = Path(argv[0]) if argv else ROOT / "outputs" / "docs"
    if out.is_file():
        print(f"{out} is a file: name a folder", file=sys.stderr)
        return 2
    problems = build(out)
    print("\n".join(problems) or f"built {out}/index.html", file=sys.stderr if problems else sys.stdout)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
