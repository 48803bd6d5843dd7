"""Generates a page for each script of examples/, for readers who have only the wheel."""

from __future__ import annotations

import ast
from pathlib import Path

from generate.markdown import fence, plain, prose, table


def pages(root: Path) -> dict[str, str]:
    """Returns the page `examples/NAME.md` of each script, and an index."""
    pages_by_name = {}
    rows = []
    for path in sorted((root / "examples").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        docstring = ast.get_docstring(ast.parse(text)) or ""
        pages_by_name[f"examples/{path.stem}.md"] = (
            f"# {path.name}\n\n{prose(docstring)}\n\n{fence('python', text)}\n"
        )
        summary = " ".join(docstring.split("\n\n")[0].split())
        rows.append([f"[{path.name}]({path.stem}.md)", plain(summary)])
    entries = "\n".join(name.split("/")[1].removesuffix(".md") for name in pages_by_name)
    pages_by_name["examples/index.md"] = f"""# Examples

Scripts to start from. Each runs on a CPU, and the tests run them.

{table(["script", "content"], rows)}

```{{toctree}}
:hidden:

{entries}
```
"""
    return pages_by_name
