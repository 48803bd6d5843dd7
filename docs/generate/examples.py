"""A page for each script of examples/, with its text, so that who has the wheel alone has them."""

from __future__ import annotations

import ast
from pathlib import Path

from generate.markdown import fence, plain, prose, table


def pages(root: Path) -> dict[str, str]:
    """`examples/NAME.md` for each, and their list."""
    made = {}
    rows = []
    for path in sorted((root / "examples").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        said = ast.get_docstring(ast.parse(text)) or ""
        made[f"examples/{path.stem}.md"] = (
            f"# {path.name}\n\n{prose(said)}\n\n{fence('python', text)}\n"
        )
        first = " ".join(said.split("\n\n")[0].split())
        rows.append([f"[{path.name}]({path.stem}.md)", plain(first)])
    entries = "\n".join(name.split("/")[1].removesuffix(".md") for name in made)
    made["examples/index.md"] = f"""# Examples

Scripts to copy from; each runs on a CPU, and the tests run them.

{table(["script", "what"], rows)}

```{{toctree}}
:hidden:

{entries}
```
"""
    return made
