"""The commands' options, and their conversion to settings.

Some options are shared by several commands. The options for the settings of a run are made from the
classes of the settings. The type of a field is the type of the option, and the first sentence about
the field in the docstring of the class is the help text. The classes are parsed but not imported,
so that `--help` needs neither torch nor NumPy.

This module also reads --set, the config file and files with user code (FILE.py:NAME), and checks
which options --resume allows.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsynth.cli.application import OptionError
from fedsynth.data.partition_settings import BY_LABELS, DOMAIN, NATURAL
from fedsynth.data.registry import DATASETS
from fedsynth.files import expand_home
from fedsynth.own_code import LOADERS, METHOD_FEATURES, names_a_file
from fedsynth.results.file_names import CONFIG

Sections = dict[str, dict[str, Any]]
Note = Callable[[str], None]


def set_options(texts: list[str], chosen: Sections | None = None) -> Sections:
    """Parses the --set options, and adds them to the other options' settings.

    KEY=VALUE is a setting of the method. SECTION.KEY=VALUE is a setting of another section. Of two
    values for the same key, the last one counts.

    Returns:
        The settings by section.

    Raises:
        OptionError: a text has another form, or a setting is also given by its own option.
    """
    chosen = chosen or {}
    sections = copy.deepcopy(chosen)
    sections.setdefault("method", {})
    for text in texts:
        key, equals, value = text.partition("=")
        section, dot, name = key.strip().partition(".")
        if not dot:
            section, name = "method", section
        if not equals or not name or section not in KEYS:
            raise OptionError(
                f"--set must be KEY=VALUE or SECTION.KEY=VALUE, got {text!r}. Use one of the "
                f"sections {', '.join(KEYS)}"
            )
        if name in chosen.get(section, {}):
            raise OptionError(
                f"{section}.{name} is set by an option and by --set. Remove one of them"
            )
        sections.setdefault(section, {})[name] = value.strip()
    return sections


def read_config(path: Path | None) -> Sections:
    """Reads the sections from a TOML file or from a run folder's config.toml.

    The custom code that a TOML file names as FILE.py:NAME is loaded. The code that the config.toml
    of a run folder names is not, because a run folder may come from an unknown person.

    Returns an empty dictionary if the path is None."""
    if path is None:
        return {}
    from fedsynth.validation import read_sections

    if path.is_dir() or path.name == CONFIG:
        return read_sections(path / CONFIG if path.is_dir() else path)
    return with_own_code(read_sections(path))


def merged(config: Sections, chosen: Sections, note: Note = lambda text: None) -> Sections:
    """Combines config-file settings with options, which override the file.

    If the options select another method than the file, the method's settings in the file are
    dropped, and `note` receives a message about this.
    """
    from fedsynth.methods import DEFAULT_METHOD

    config = copy.deepcopy(config)
    old = config.get("run", {}).get("method", DEFAULT_METHOD)
    new = str(chosen["run"].get("method", old))
    if new != old and config.pop("method", None):
        note(f"note: settings of {old} in the config file are ignored, because this run uses {new}")
    if chosen.get("data", {}).get("folder") and "folder" not in config.get("data", {}):
        # custom images replace a named data set, whose name they do not have
        config.get("data", {}).pop("dataset", None)
        config.get("partition", {}).pop("kind", None)
    if "features" in chosen.get("model", {}):  # --features, which some methods have, too
        config.get("method", {}).pop("features", None)
    for section, values in chosen.items():
        config.setdefault(section, {}).update(values)
    return config


def from_table(name: str, config: Path | None, chosen: Sections, note: Note) -> Sections:
    """Returns the run settings for reproducing one number in a published table.

    Settings of the options override those of the table.

    Args:
        name: the name of the table's preset.
        config: the value of --config, which must be None.
        chosen: the settings that the options and --set give.
        note: receives a line with the name of the cell.

    Raises:
        OptionError: --config is given, too.
        FedsynthError: there is no such preset or cell.
    """
    if config is not None:
        raise OptionError("--preset and --config both define all settings. Remove one of them")
    from fedsynth.experiments.presets import cell_words, preset, preset_sections

    table = preset(name)
    sections, cell = preset_sections(table, chosen)
    note(f"preset {name} ({table.source}, {table.table}): {cell_words(cell, table)}")
    return sections


def from_preset(sections: Sections) -> str:
    """Returns a line that names the settings taken from the data set's preset.

    Returns an empty string if there are no such settings.
    """
    from fedsynth.config.resolve import preset_of
    from fedsynth.data.registry import DEFAULT_DATASET
    from fedsynth.methods import DEFAULT_METHOD, method_class
    from fedsynth.validation import flattened

    if sections["data"].get("folder"):
        return ""  # custom images have no preset
    dataset = str(sections["data"].get("dataset", DEFAULT_DATASET))
    method = method_class(str(sections["run"].get("method", DEFAULT_METHOD)))
    preset, chosen = flattened(preset_of(dataset, method)), flattened(sections)
    changed = [f"{key}={value}" for key, value in preset.items() if key not in chosen]
    if not changed:
        return ""
    return f"settings from the preset of {dataset}: {', '.join(changed)}"


# The parameters of `train` that may be combined with --resume.
BESIDE_RESUME = (
    "resume device memory_gb compile data_root encoder_weights encoder_cache download as_json log"
)


def with_own_code(chosen: Sections) -> Sections:
    """Loads and registers the user's own code from options like FILE.py:NAME.

    Returns the settings with the names under which the code is registered.
    """
    if not any(".py" in str(value) for values in chosen.values() for value in values.values()):
        return chosen
    from fedsynth.config.loading import with_own_code as loaded  # needs torch

    return loaded(chosen)


def refuse_beside_resume(context: typer.Context) -> None:
    """Refuses options that cannot be combined with --resume.

    A resumed run keeps its settings, so options for settings are not allowed.

    Raises:
        OptionError: an option is not allowed with --resume. The message names the option.
    """
    own_code = {option for option, _ in LOADERS.values()}
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        explicit = source is not None and source.name == "COMMANDLINE"
        names = str(context.params.get(name)).split(",")
        if own_code.intersection(parameter.opts) and any(map(names_a_file, names)):
            continue  # user code has to be given again
        if explicit and name not in BESIDE_RESUME.split():
            raise OptionError(f"{parameter.opts[0]} cannot be used with --resume. Remove it")


PATH = "PATH"


def path(text: str) -> Path:
    """Parses a path. Some Typer versions show this function's name in help texts."""
    return expand_home(text)


def path_option(help: str, *names: str, metavar: str = PATH, panel: str | None = None) -> Any:
    """Returns a Typer option for the path of a file or folder."""
    return typer.Option(*names, parser=path, metavar=metavar, help=help, rich_help_panel=panel)


def flag(name: str, help: str) -> Any:
    """Returns a Typer option without a value."""
    return typer.Option(name, help=help)


def path_argument(help: str, metavar: str = PATH) -> Any:
    """Returns a Typer argument for the path of a file or folder."""
    return typer.Argument(parser=path, metavar=metavar, help=help)


Config = Annotated[
    Path | None,
    path_option("A config.toml, or a run folder with such a file. Options override its settings."),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="Use the settings of a published table, such as feddm:table2 (`fedsynth reproduce` "
        "lists all). The options --dataset, --method, --alpha, --clients and --rounds choose the "
        "cell of the table. Other options override its settings."
    ),
]
Output = Annotated[Path, path_option("The folder that contains the run folders.")]
Resume = Annotated[
    Path | None,
    path_option(
        "Resume the unfinished run in this folder (runs/….incomplete) with the same settings.",
        metavar="RUN",
    ),
]
Log = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Also log each round to tensorboard or wandb, below --output. May be repeated. Each "
        "needs the pip extra with the same name.",
    ),
]
AsJson = Annotated[bool, flag("--json", "Print the result as JSON on stdout.")]
DryRun = Annotated[bool, flag("--dry-run", "Only print the run's privacy cost. Reads no data.")]
Download = Annotated[bool, flag("--download", "Download the data set with torchvision.")]


PACKAGE = Path(__file__).absolute().parent.parent
RUN_SETTINGS = "config/settings.py:RunSettings"
# The classes whose fields are the settings of each section, as FILE:NAME.
CLASSES: Mapping[str, tuple[str, ...]] = {
    "run": (RUN_SETTINGS,),
    "data": (
        RUN_SETTINGS,
        "data/declaration.py:FolderSettings",
        "features/encoding.py:EncoderSettings",
    ),
    "partition": ("data/partition_settings.py:PartitionSettings",),
    "model": ("models/registry.py:ModelSettings",),
    "method": (
        "methods/shared/condensing.py:TrainsOnUnion",
        "methods/shared/condensing.py:CondensingMethod",
    ),
    "privacy": ("privacy/settings.py:PrivacySettings",),
    "report": ("config/settings.py:ReportSettings",),
}
# The settings that have an option, by section. `--set` sets all others.
KEYS: Mapping[str, str] = {
    "run": "method rounds seed device precision compile memory_gb threads participation "
    "client_failures quorum robust",
    "data": "dataset data_root folder test_folder test image_size channels "
    "skip_corrupt skip_other declaration window slice encoder encoder_weights public_images "
    "encoder_cache feature_columns label_column user_column site_column bounds revision",
    "partition": "kind clients alpha classes_per_client min_size subset local_test",
    "model": "name weights clients features width depth norm",
    "method": "ipc matching",
    "privacy": "epsilon noise_multiplier clip delta max_records mechanism sample_rate nominal_size "
    "adjacency unit four_sums ledger",
    "report": "responsible purpose sites",
}
# The settings that name the columns of a file.
COLUMNS = ("data.feature_columns", "data.label_column", "data.user_column", "data.site_column")
# The names of options that do not follow from the names of the settings.
NAMES: Mapping[str, str] = {
    "data.folder": "--data",
    "data.test_folder": "--test-data",
    "partition.kind": "--partition",
    "model.name": "--model/--server-model",
    "model.weights": "--model-weights",
    "model.clients": "--client-models",
    "privacy.noise_multiplier": "--dp-sigma",
}

PATHS = (
    "data_root", "folder", "test_folder", "declaration", "ledger", "encoder_weights",
    "public_images", "encoder_cache",
)  # fmt: skip
PANELS: Mapping[str, str] = {
    "data": "Data and partition",
    "partition": "Data and partition",
    "model": "Model",
    "privacy": "Differential privacy",
    "report": "Differential privacy",
}
_PUBLISHED = ", ".join(name for name in DATASETS if "(" not in name)
# Help texts of settings whose values are not fixed in a docstring.
HELPS: Mapping[str, str] = {
    "data.dataset": f"The data set: {_PUBLISHED}, or 'synthetic(1,1)' with other numbers. Only "
    "digits and plays are part of the package. Or hf:NAME or hf:FOLDER (a hub's data set), or "
    "medmnist:FILE.",
    "partition.kind": f"The kind of partition: {', '.join(BY_LABELS)}, {DOMAIN} or {NATURAL} (the "
    "grouping of the data). For more settings, use `--set partition.KEY=VALUE`.",
}

_KINDS: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "Path": Path}
_FIELD_TEXT = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)


# The settings whose value may be a file with user code. `--features` sets that of a method, too.
OWN_CODE = [f"{section}.{key}" for section, key in LOADERS if (section, key) != METHOD_FEATURES]

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
    *places: str, set_option: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command with options for settings and with `--set`.

    The first argument of the command contains the options' values by section. `--set` accepts all
    settings, with or without an option. The user's own code that the values name is loaded.

    Args:
        places: sections such as "run", which stand for all settings with an option, or single
            settings such as "run.seed".
        set_option: whether the command has the option `--set`.
    """
    options = {place: setting_parameter(place) for place in _settings(places)}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**values: Any) -> None:
            sections: Sections = {section: {} for section in KEYS}
            for place, parameter in options.items():
                section, _, key = place.partition(".")
                value = values.pop(parameter.name)
                if value is not None:
                    sections[section][key] = str(value) if isinstance(value, Path) else value
            texts = values.pop("settings") if set_option else None
            command(with_own_code(set_options(texts or [], sections)), **values)

        signature = inspect.signature(command, eval_str=True)
        _, *rest = signature.parameters.values()
        parameters = list(options.values())
        parameters += [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in rest]
        if set_option:
            parameters.append(_parameter("settings", Set))
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def setting_parameter(place: str) -> inspect.Parameter:
    """Creates the function parameter and the Typer option for a setting such as "privacy.clip"."""
    section, _, key = place.partition(".")
    kind, text = _fields(section)[key]
    usual = f"--{'dp-' if section == 'privacy' else ''}{key}".replace("_", "-")
    name = NAMES.get(place, usual)
    texts = name.split("/")
    parameter = texts[0].removeprefix("--").replace("-", "_")
    if kind is bool:
        texts = [f"{name}/--no-{name[2:]}"]
    option = typer.Option(
        *texts,
        help=HELPS.get(place, text),
        metavar=PATH if key in PATHS else None,
        parser=path if kind is Path else None,
        rich_help_panel=PANELS.get(section),
    )
    return _parameter(parameter, Annotated[kind | None, option])


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
    """Returns the type and the help text of each setting in a section.

    They are read from the classes that define the section's settings.
    """
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
    """Returns the first sentence about each field in the `Args` section of a docstring."""
    _, _, arguments = docstring.partition("Args:\n")
    helps = {}
    for names, text in _FIELD_TEXT.findall(arguments.partition("\n\n")[0]):
        sentence = " ".join(text.split())
        first = re.split(r"(?<=\.) (?=[A-Z`\"])", sentence)[0]
        if re.match("a |[a-z]{2}", first):  # a word, not a symbol such as σ
            first = first[0].upper() + first[1:]
        helps.update(dict.fromkeys(names.split(", "), first))
    return helps
