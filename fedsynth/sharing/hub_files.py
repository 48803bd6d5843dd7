"""Writes the files with which other libraries load an exported synthetic set.

`datasets.load_dataset(FOLDER)` reads the head of the README, which names the pictures, or the CSV
file of sets that cannot be drawn. `croissant.json` describes the set in the format Croissant 1.0 of
MLCommons. It states no licence, address, date and author, because only the people who publish the
set know them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedsynth.data.shared_set import TENSORS, SharedSet
from fedsynth.data.tables import has_meaning
from fedsynth.files import file_hash

CROISSANT, VALUES = "croissant.json", "values.csv"
PICTURES = "images/*/*.png"
_LABEL_IN_PATH = r"(?:.*/)?images/(\d+)-[^/]*/[^/]*"
_TERMS = (
    "column extract field fileObject fileProperty fileSet includes recordSet regex source transform"
)
_CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "sc": "https://schema.org/",
    "conformsTo": "http://purl.org/dc/terms/conformsTo",
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    **{term: f"cr:{term}" for term in _TERMS.split()},
}


def write_values(synthetic: SharedSet, folder: Path) -> None:
    """Writes the file `values.csv` for records that are not images, such as vectors.

    A row has the label, the values in their original units, and with soft labels the probabilities
    p0, p1, … of the classes. Values are named as the table's columns, or x0, x1, … without usable
    names. All values are exact.
    """
    values = synthetic.values().flatten(1)
    used_names = {"label", *(f"p{label}" for label in range(synthetic.spec.classes))}
    named = synthetic.spec.features
    unusable = {name for name in named if has_meaning(name) or set(',"').intersection(name)}
    if len(named) != values.shape[1] or unusable or used_names.intersection(named):
        named = tuple(f"x{position}" for position in range(values.shape[1]))
    names = ["label", *named]
    columns = [synthetic.labels[:, None].numpy(), values.numpy()]
    if synthetic.soft_labels is not None:
        names += [f"p{label}" for label in range(synthetic.spec.classes)]
        columns.append(synthetic.soft_labels.numpy())
    table = np.hstack(columns)
    formats = ["%d", *["%.9g"] * (len(names) - 1)]
    np.savetxt(folder / VALUES, table, formats, ",", header=",".join(names), comments="")


def write_croissant(synthetic: SharedSet, folder: Path, description: str) -> None:
    """Writes the file `croissant.json`, which describes the other files of an exported set.

    Args:
        synthetic: the set.
        folder: the folder, which already contains the files with the data.
        description: a sentence about the set.
    """
    files = [_file(folder, TENSORS, "application/octet-stream")]
    if synthetic.spec.can_be_drawn:
        files.append(
            {
                "@type": "cr:FileSet",
                "@id": "pictures",
                "name": "pictures",
                "includes": PICTURES,
                "encodingFormat": "image/png",
            }
        )
        source = {"fileSet": {"@id": "pictures"}, "extract": {"fileProperty": "content"}}
        label = {"extract": {"fileProperty": "fullpath"}, "transform": {"regex": _LABEL_IN_PATH}}
        fields = [
            _field("image", "sc:ImageObject", source),
            _field("label", "sc:Integer", {**source, **label}),
        ]
    else:
        files.append(_file(folder, VALUES, "text/csv"))
        with (folder / VALUES).open(encoding="utf-8") as file:
            names = file.readline().strip().split(",")
        kinds = ["sc:Integer", *["sc:Float"] * (len(names) - 1)]
        fields = []
        for name, kind in zip(names, kinds, strict=True):
            source = {"fileObject": {"@id": VALUES}, "extract": {"column": name}}
            fields.append(_field(name, kind, source))
    records = {"@type": "cr:RecordSet", "@id": "examples", "name": "examples", "field": fields}
    card = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "name": f"Synthetic images of {synthetic.spec.name}",
        "description": description,
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "distribution": files,
        "recordSet": [records],
    }
    text = json.dumps(card, indent=2, ensure_ascii=False) + "\n"
    (folder / CROISSANT).write_text(text, "utf-8")


def _file(folder: Path, name: str, media_type: str) -> dict[str, Any]:
    """Describes a file, with its hash."""
    return {
        "@type": "cr:FileObject",
        "@id": name,
        "name": name,
        "contentUrl": name,
        "encodingFormat": media_type,
        "sha256": file_hash(folder / name),
    }


def _field(name: str, kind: str, source: dict[str, Any]) -> dict[str, Any]:
    """Returns the Croissant description of a record field."""
    return {
        "@type": "cr:Field",
        "@id": f"examples/{name}",
        "name": name,
        "dataType": kind,
        "source": source,
    }
