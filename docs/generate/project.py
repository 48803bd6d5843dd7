"""Generates pages of the site from the documents at the top of the repository."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENTS = {
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "RELEASING.md": "releasing.md",
    "SECURITY.md": "security.md",
}


def pages(root: Path) -> dict[str, str]:
    """Returns their texts, with links relative to docs/generated."""
    return {
        page: _moved((root / document).read_text(encoding="utf-8"))
        for document, page in DOCUMENTS.items()
    }


def _moved(text: str) -> str:
    text = re.sub(r"\]\(docs/", "](../", text)
    for document, page in DOCUMENTS.items():
        text = text.replace(f"]({document}", f"]({page}")
    return re.sub(
        r"\]\((?!https?://|\.\./|#)(\w[^)]*)\)",
        lambda link: (
            link[0] if link[1].partition("#")[0] in DOCUMENTS.values() else f"](../../{link[1]})"
        ),
        text,
    )
