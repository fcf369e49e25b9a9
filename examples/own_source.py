"""A data source of one's own: the chapters of a Markdown file, each a document.

python -m launch.train plugins=[examples.own_source] recipe=long_context data=files data.source=chapters:README.md \
    run.dir=outputs/chapters
python -m launch.tokenize plugins=[examples.own_source] source=chapters:README.md to=readme.tokens
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from ejdist.plugins import register_source


def chapters(path: str) -> Iterator[str]:
    """Yields the text from each heading of the second level to the next."""
    for text in re.split(r"(?m)^(?=## )", Path(path).read_text()):
        if text.strip():
            yield text


def identity(path: str) -> str:
    """Returns the digest of the file: a run of another text is another run."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"data.source = 'chapters:{path}' cannot be read: {error.strerror}; name a file") from error


register_source("chapters", chapters, identity=identity)
