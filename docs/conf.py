"""Configures Sphinx, which builds the site from the Markdown files here and from generated pages.

    pip install -c constraints-docs.txt '.[docs]'
    python -m sphinx -W --keep-going -b html docs docs/_build/html

The build downloads nothing, and the site loads nothing from other servers.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))  # for `generate`

from fedsynth import __version__  # noqa: E402
from generate import write_all  # noqa: E402
from generate.project import DOCUMENTS  # noqa: E402

project = "fedsynth"
author = "The fedsynth maintainers"
copyright = "the fedsynth maintainers, Apache-2.0"
release = __version__
version = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "generate"]
templates_path: list[str] = []
html_theme = "furo"
html_title = f"fedsynth {release}"
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_css_files = ["site.css"]

# Markdown. Every heading down to the third level can be linked to.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_dmath_double_inline = False
suppress_warnings = ["myst.header"]  # a generated section may begin below its page's title

# Docstrings are plain English with `names`, not reStructuredText with roles.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
napoleon_use_param = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Class attributes", "params_style")]

# Tutorials are executed whenever they changed; a cell that fails ends the build.
nb_execution_mode = os.environ.get("FEDSYNTH_DOCS_EXECUTE", "cache")
if nb_execution_mode == "off":
    suppress_warnings.append("myst-nb.lexer")  # only a kernel knows its language
nb_execution_in_temp = True
nb_execution_timeout = 150
nb_execution_raise_on_error = True
nb_execution_excludepatterns = ["generated/*", "decisions/*"]
nb_merge_streams = True
nb_number_source_lines = False

# Links to other servers: `python -m sphinx -b linkcheck`.
linkcheck_timeout = 20
linkcheck_anchors = False
linkcheck_workers = 2

ELSEWHERE = {f"../{document}": f"generated/{page}" for document, page in DOCUMENTS.items()}


def redirect_links(app: Any, page: str, source: list[str]) -> None:
    """Redirects links to top-level documents, and mentions of examples, to their pages in the
    site.
    """
    up = "../" * page.count("/")
    text = source[0]
    for document, target in ELSEWHERE.items():
        text = text.replace(f"]({up}{document}", f"]({up}{target}")
    if not page.startswith("generated/examples"):
        text = re.sub(
            r"(?<![\[`\w])`examples/(\w+)\.py`(?!\])",
            rf"[`examples/\1.py`]({up}generated/examples/\1.md)",
            text,
        )
    text = re.sub(r"\]\((?:\.\./)+examples/(\w+)\.py\)", rf"]({up}generated/examples/\1.md)", text)
    if page == "decisions/README":
        text += _hidden_list(path.stem for path in sorted((DOCS / "decisions").glob("[a-z]*.md")))
    source[0] = text


def _hidden_list(names: Iterable[str]) -> str:
    entries = "\n".join(names)
    return f"\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"


def prepare_kernels() -> None:
    """Prepares the environment in which tutorials run.

    They call the `fedsynth` of the Python that builds the site, with one thread.
    """
    script = DOCS / "_build" / "bin" / "fedsynth"
    script.parent.mkdir(parents=True, exist_ok=True)
    start = "from fedsynth.cli.app import main; main()"
    script.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{start}' \"$@\"\n")
    script.chmod(0o755)
    flower = Path(sys.executable).parent  # the folder of Flower's commands
    os.environ["PATH"] = os.pathsep.join([str(script.parent), str(flower), os.environ["PATH"]])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    first = DOCS / "_build" / "ipython" / "profile_default" / "startup"
    first.mkdir(parents=True, exist_ok=True)
    shutil.copy(DOCS / "cells.py", first)
    os.environ["IPYTHONDIR"] = str(DOCS / "_build" / "ipython")


def write_generated_pages(app: Any) -> None:
    """Writes the generated pages before Sphinx looks for pages."""
    write_all()
    prepare_kernels()


def distribute_tutorials(app: Any, environment: Any, pages: list[str]) -> None:
    """Distributes the tutorials over the reading processes, because executing them takes
    longest.
    """
    slow = [page for page in pages if page.startswith("tutorials/")]
    quick = [page for page in pages if page not in slow]
    step = len(quick) // max(1, len(slow))
    for number, page in enumerate(slow):
        quick.insert(number * (step + 1), page)
    pages[:] = quick


def setup(app: Any) -> dict[str, bool]:
    """Connects the functions of this file to the events of the build."""
    app.connect("builder-inited", write_generated_pages)
    app.connect("env-before-read-docs", distribute_tutorials)
    app.connect("source-read", redirect_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
