"""Options of the commands.

Some options are shared by several commands. Others set the settings of a run. These are made from
the classes of the settings: the type of a field is the type of the option, and the first sentence
about the field in the docstring of the class is the help text. The classes are parsed but not
imported, so that `--help` needs neither torch nor NumPy.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsynth.cli.settings_options import Sections, with_set_options
from fedsynth.data.partition_settings import BY_LABELS, DOMAIN, NATURAL
from fedsynth.data.registry import DATASETS
from fedsynth.privacy.files import expand_home

PATH = "PATH"


def path_option(help: str, *names: str, metavar: str = PATH, panel: str | None = None) -> Any:
    """Returns a Typer option for the path of a file or folder."""
    return typer.Option(
        *names, parser=expand_home, metavar=metavar, help=help, rich_help_panel=panel
    )


def path_argument(help: str, metavar: str = PATH) -> Any:
    """Returns a Typer argument for the path of a file or folder."""
    return typer.Argument(parser=expand_home, metavar=metavar, help=help)


Config = Annotated[
    Path | None,
    path_option("A config.toml, or a run folder with such a file. Options override its settings."),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="Use the settings of a published table, such as feddm:table2 (`fedsynth reproduce "
        "--list`). The options --dataset, --method, --alpha, --clients and --rounds choose the "
        "cell of the table. Other options override its settings."
    ),
]
Output = Annotated[Path, path_option("The folder that contains the run folders.")]
Resume = Annotated[
    Path | None,
    path_option(
        "Resume the unfinished run in this folder (runs/….incomplete) with the same settings. "
        "Only --device, --memory-gb, --compile and --data-root can be changed.",
        metavar="RUN",
    ),
]
Log = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Also log each round to csv, tensorboard, wandb or mlflow, below --output. May be "
        "repeated. All except csv need the pip extra with the same name.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only print the run's privacy cost, without reading data.")
]
Download = Annotated[
    bool, typer.Option("--download", help="Download the data set with torchvision.")
]
SignKey = Annotated[
    Path | None,
    path_option(
        "Sign the run folder with this private Ed25519 key in PEM format.",
        panel="Differential privacy",
    ),
]


PACKAGE = Path(__file__).absolute().parent.parent
RUN_SETTINGS = "config/settings.py:RunSettings"
CLASSES: Mapping[str, tuple[str, ...]] = {
    "run": (RUN_SETTINGS,),
    "data": (RUN_SETTINGS, "data/folder_settings.py:FolderSettings"),
    "partition": ("data/partition_settings.py:PartitionSettings",),
    "model": ("models/registry.py:ModelSettings",),
    "method": ("methods/shared/condensing.py:CondensingMethod",),
    "privacy": ("privacy/settings.py:PrivacySettings",),
    "report": ("config/report_settings.py:ReportSettings",),
}
"""The classes whose fields are the settings of each section, as FILE:NAME."""
KEYS: Mapping[str, str] = {
    "run": "method rounds seed device precision compile memory_gb threads participation "
    "client_failures quorum robust",
    "data": "dataset data_root folder test_folder test image_size channels "
    "skip_corrupt skip_other declaration",
    "partition": "kind clients alpha classes_per_client min_size subset local_test",
    "model": "name clients features width depth norm",
    "method": "ipc matching",
    "privacy": "epsilon noise_multiplier clip delta max_records mechanism sample_rate nominal_size "
    "adjacency unit four_sums ledger",
    "report": "responsible purpose sites",
}
"""The settings that have an option, by section. `--set` sets all others."""
NAMES: Mapping[str, str] = {
    "data.folder": "--data",
    "data.test_folder": "--test-data",
    "partition.kind": "--partition",
    "model.name": "--model/--server-model",
    "model.clients": "--client-models",
    "privacy.noise_multiplier": "--dp-sigma",
}
"""The names of options that do not follow from the names of the settings."""
PATHS = ("data_root", "folder", "test_folder", "declaration", "ledger")
PANELS: Mapping[str, str] = {
    "data": "Data and partition",
    "partition": "Data and partition",
    "model": "Model",
    "privacy": "Differential privacy",
    "report": "Differential privacy",
}
_PUBLISHED = ", ".join(name for name in DATASETS if "(" not in name)
HELPS: Mapping[str, str] = {
    "data.dataset": f"{_PUBLISHED}, or 'synthetic(1,1)' with your own numbers. The digits are "
    "part of fedsynth.",
    "partition.kind": f"{', '.join(BY_LABELS)}, {DOMAIN} or {NATURAL} (the grouping of the "
    "data); `--set partition.KEY=VALUE` sets more options.",
}
"""Help texts of settings whose values are not fixed in a docstring."""
_KINDS: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "Path": Path}
_FIELD_TEXT = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)


@dataclass(frozen=True)
class SettingOption:
    """An option that sets a setting of a run.

    Attributes:
        name: the name, such as "--dp-sigma". A second name may follow after "/".
        section, key: the section and key of the setting.
        kind: the type of the values.
        help: the help text, a single sentence.
    """

    name: str
    section: str
    key: str
    kind: type
    help: str

    @property
    def parameter(self) -> str:
        """The name of the parameter in the command's function."""
        return self.name.split("/")[0].removeprefix("--").replace("-", "_")

    def signature(self) -> inspect.Parameter:
        """Returns the parameter in the form that Typer reads."""
        names = self.name.split("/")
        option = typer.Option(
            *([f"{self.name}/--no-{self.name[2:]}"] if self.kind is bool else names),
            help=self.help,
            metavar=PATH if self.key in PATHS else None,
            parser=expand_home if self.kind is Path else None,
            rich_help_panel=PANELS.get(self.section),
        )
        annotation: Any = Annotated[self.kind | None, option]
        return _parameter(self.parameter, annotation)


OWN_CODE = ("run.method", "model.name", "model.features")
"""The settings whose value may be a file with user code."""
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the method as KEY=VALUE, or of another section as SECTION.KEY=VALUE, "
        "such as model.projection=256. May be repeated.",
    ),
]


def takes_settings(
    *places: str, names: Mapping[str, str] | None = None, set_option: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command options for settings, and `--set` for all other settings.

    The first argument of the command then contains the values by section.

    Args:
        places: sections such as "run", which stand for all settings with an option, or single
            settings such as "run.seed".
        names: other names of options for this command, by setting.
        set_option: whether the command has the option `--set`.
    """
    options = [setting_option(place, names or {}) for place in _settings(places)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**values: Any) -> None:
            sections: Sections = {section: {} for section in KEYS}
            for option in options:
                value = values.pop(option.parameter)
                if value is not None:
                    plain = str(value) if option.kind is Path else value
                    sections[option.section][option.key] = plain
            texts = values.pop("settings") if set_option else None
            command(with_set_options(sections, texts or []), **values)

        signature = inspect.signature(command, eval_str=True)
        _, *rest = signature.parameters.values()
        parameters = [option.signature() for option in options]
        parameters += [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in rest]
        if set_option:
            parameters.append(_parameter("settings", Set))
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def setting_option(place: str, names: Mapping[str, str]) -> SettingOption:
    """Returns the option for a setting such as "privacy.clip"."""
    section, _, key = place.partition(".")
    kind, text = _fields(section)[key]
    usual = f"--{'dp-' if section == 'privacy' else ''}{key}".replace("_", "-")
    name = names.get(place, NAMES.get(place, usual))
    return SettingOption(name, section, key, kind, HELPS.get(place, text))


def _settings(places: tuple[str, ...]) -> Iterator[str]:
    for place in places:
        if "." in place:
            yield place
        else:
            yield from (f"{place}.{key}" for key in KEYS[place].split())


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=annotation)


@cache
def _fields(section: str) -> dict[str, tuple[type, str]]:
    """Returns the type and the help text of each field in the classes of a section."""
    fields = {}
    for place in CLASSES[section]:
        file, _, name = place.partition(":")
        tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
        (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
        helps = _helps(ast.get_docstring(cls) or "")
        for node in cls.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                kind, _, _ = ast.unparse(node.annotation).partition(" |")
                fields[node.target.id] = (_KINDS.get(kind, str), helps.get(node.target.id, ""))
    return fields


def _helps(docstring: str) -> dict[str, str]:
    """Returns the first sentence about each field in the `Args` of a docstring."""
    _, _, arguments = docstring.partition("Args:\n")
    helps = {}
    for names, text in _FIELD_TEXT.findall(arguments.partition("\n\n")[0]):
        sentence = " ".join(text.split())
        first = re.split(r"(?<=\.) (?=[A-Z`\"])", sentence)[0]
        if re.match("[a-z]{2}", first):  # a word, not a symbol such as σ
            first = first[0].upper() + first[1:]
        helps.update(dict.fromkeys(names.split(", "), first))
    return helps
