"""Files of one's own among the options (a method, a model, a feature map, as FILE.py:NAME), and
what may stand beside --resume: such a file has to be given again, and little else can be."""

from __future__ import annotations

import typer

from fedsynth.cli.errors import OptionError
from fedsynth.cli.settings_options import Sections
from fedsynth.errors import SettingError

OWN_CODE = ("method", "model", "features")
"""Options that may name a file of one's own."""
OWN_SETTINGS = (
    ("run", "method"),
    ("model", "name"),
    ("model", "features"),
    ("method", "features"),
)
"""The settings that may."""
RECORDED = {
    ("run", "method"): (("run", "method_source"),),
    ("model", "name"): (("model", "name"),),
    ("model", "features"): (("model", "features"), ("method", "features")),
}
"""Where config.toml says which file was given by an option."""
BESIDE_RESUME = {
    "resume",
    "device",
    "memory_gb",
    "compile",
    "data_root",
    "download",
    "as_json",
    "sign_key",
    "log",
}
"""Parameters of `train` that may stand beside --resume."""


def with_own_code(chosen: Sections) -> Sections:
    """What options say, with files of one's own (FILE.py:NAME) loaded and registered.

    Of options alone: what a config file names is never executed.

    Raises:
        SettingError: a file that cannot be executed, or has no such model, method or feature map.
    """
    from fedsynth.own_code import load_own, names_a_file

    chosen = {section: dict(values) for section, values in chosen.items()}
    for section, key in OWN_SETTINGS:
        given = str(chosen.get(section, {}).get(key) or "")
        if given.endswith(".py"):
            raise SettingError(section, key, f"must be FILE.py:NAME, got {given}")
    method = str(chosen.get("run", {}).get("method") or "")
    if names_a_file(method):
        from fedsynth.methods import register_method

        chosen["run"]["method"] = register_method(*load_own("run", "method", method))
    model = str(chosen.get("model", {}).get("name") or "")
    if names_a_file(model):
        from fedsynth.models.registry import register_model_file

        chosen["model"]["name"] = register_model_file(model).name
    for section in ("model", "method"):
        features = str(chosen.get(section, {}).get("features") or "")
        if names_a_file(features):
            from fedsynth.features.registry import register_file

            chosen[section]["features"] = register_file(features, section)
    return chosen


def own_code_alone(method: str | None, model: str | None, features: str | None) -> None:
    """Registers the files of one's own that a command on a run's folder is given."""
    with_own_code({"run": {"method": method}, "model": {"name": model, "features": features}})


def refuse_beside_resume(context: typer.Context) -> None:
    """A run that is resumed has its own settings.

    Raises:
        OptionError: names the first option that cannot be given with --resume.
    """
    from fedsynth.own_code import names_a_file

    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        if name in OWN_CODE and names_a_file(str(context.params.get(name))):
            continue  # of one's own: it has to be given again
        if given and name not in BESIDE_RESUME:
            raise OptionError(
                f"--resume goes on with the settings of the run's config.toml; {parameter.opts[0]} "
                "cannot be given beside it"
            )


def refuse_needless_code(config: Sections, chosen: Sections) -> None:
    """Of a run that goes on: a file of one's own that was given again, though it has none there.

    It is not executed, as nothing would come of it.

    Args:
        config: the run's own settings.
        chosen: what was given.

    Raises:
        SettingError: names it.
    """
    from fedsynth.own_code import is_label, names_a_file

    for (section, key), places in RECORDED.items():
        given = str(chosen.get(section, {}).get(key) or "")
        has = [str(config.get(one, {}).get(name)) for one, name in places]
        if names_a_file(given) and not any(is_label(one) for one in has):
            raise SettingError(
                section, key, f"is {given}, and the run that goes on has no such file of its own"
            )
