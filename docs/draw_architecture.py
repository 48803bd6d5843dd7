"""Draws images/architecture.svg from the imports: `python docs/draw_architecture.py`.

The packages stand in the order of `.ci/lint.toml`. A dot means that a file of the row's package
imports one of the column's package.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
STEP, LEFT, TOP = 22, 110, 96
STYLE = (
    "text{font:13px sans-serif;fill:#444}line{stroke:#ccc}circle{fill:#2a6f97}"
    "@media(prefers-color-scheme:dark){text{fill:#ccc}line{stroke:#555}circle{fill:#7fb8d8}}"
)


def imports() -> dict[str, set[str]]:
    """Returns the packages that each package imports, in the order of the layers, highest first."""
    layers = tomllib.loads((ROOT / ".ci" / "lint.toml").read_text("utf-8"))["layers"]
    packages = {}
    for layer in reversed(layers):
        files = (ROOT / "fedsynth" / layer).resolve().rglob("*.py")
        text = "\n".join(file.read_text("utf-8") for file in files)
        found = re.findall(r"^\s*(?:from|import) fedsynth\.(\w+)", text, re.MULTILINE)
        packages[layer] = set(found) & set(layers) - {layer}
    return packages


def drawing() -> str:
    """Returns the picture as SVG."""
    packages = imports()
    size = STEP * len(packages)
    shapes = []
    for number, name in enumerate(packages):
        middle = STEP * number + STEP // 2
        x, y = LEFT + middle, TOP + middle
        shapes += [
            f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + size}" y2="{y}"/>',
            f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{TOP + size}"/>',
            f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{name}</text>',
            f'<text transform="translate({x + 4},{TOP - 6}) rotate(-90)">{name}</text>',
        ]
    for row, targets in enumerate(packages.values()):
        for column, name in enumerate(packages):
            if name in targets:
                x, y = (start + STEP * n + STEP // 2 for start, n in ((LEFT, column), (TOP, row)))
                shapes.append(f'<circle cx="{x}" cy="{y}" r="5"/>')
    body = "\n".join(shapes)
    width, height = LEFT + size + 4, TOP + size + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(drawing(), encoding="utf-8")
