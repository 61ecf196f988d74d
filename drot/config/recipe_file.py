"""Reading a recipe from a file: a recipe in YAML or JSON, or the manifest of a checkpoint."""

import json
import re
from pathlib import Path
from typing import Any, ClassVar

from drot.config.recipe import Recipe
from drot.core.errors import UserError

#: the manifest in the folder of a checkpoint (drot/manifest/manifest.py)
MANIFEST = "drot.json"
#: suffixes of a file of settings
SUFFIXES = (".json", ".yaml", ".yml")
#: Section → the values that a run had before drot recorded these fields. A manifest without them is older.
BEFORE_THE_FIELD: dict[str, dict[str, Any]] = {
    "rotation": {
        "early_stop": 0.0,
        "boundary": "input",
        "hessians": "sequential",
        "product_dtype": "float32",
        "training_tokens": 0,
    },
    "pruning": {"solve": "none", "target": "self", "damping_average": "mean"},
}
#: values of `down_basis`, the name that `boundary` had in older manifests
DOWN_BASIS = {"own": "input", "next": "residual"}


def read_recipe(path: str | Path) -> tuple[Recipe, dict[str, Any]]:
    """The recipe in `path`, and the manifest that holds it; {} if the file is a recipe and no manifest.

    path: a .yaml, .yml or .json file with a recipe, a drot.json, or the folder of a checkpoint. A field that
        a recipe lacks has its default. A field that a manifest lacks has the value with which the older drot
        that wrote the manifest ran.

    Raises UserError for a file that is missing or broken, and for a field that is unknown or wrong.
    """
    file = Path(path) / MANIFEST if Path(path).is_dir() else Path(path)
    if file.suffix not in SUFFIXES:
        raise UserError(
            f"`recipe` must be a .yaml or .json file, or a folder that drot prune wrote; got {str(file)!r}"
        )
    data = settings_in(file)
    if not isinstance(data, dict):
        raise UserError(f"{file} must hold the sections of a recipe, got {type(data).__name__}")
    manifest = data if data.keys() & {"recipe", "format_version"} else {}
    if manifest:
        data = _from_manifest(manifest, file)
    try:
        return Recipe.from_dict(data), manifest
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def settings_in(file: Path, what: str = "recipe") -> Any:
    """The content of a file whose suffix is one of SUFFIXES: JSON, or YAML with the scalars of YAML 1.2.

    Raises UserError for a file that is missing or broken.

    what: what the file should hold, for the error message.
    """
    try:
        content = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{file} must be UTF-8: convert it, for example with iconv -t utf-8") from None
    except OSError as error:
        raise UserError(f"cannot read the {what} {file}: {error.strerror}") from None
    if file.suffix == ".json":
        try:
            return json.loads(content)
        except RecursionError:
            raise UserError(f"{file} is nested too deeply") from None
        except ValueError as error:
            raise UserError(f"{file} is not valid JSON ({error})") from None
    return _yaml(content, file)


def _yaml(content: str, file: Path) -> Any:
    """The content of a YAML file with the scalars of YAML 1.2.

    PyYAML reads YAML 1.1, in which 2:4 is the number 124 in base 60, and 1e-3 is text.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}

    for tag, pattern in (
        ("null", "|~|null"),
        ("bool", "true|false"),
        ("int", r"[-+]?[0-9]+"),
        ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"),
    ):
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$"), None)
    try:
        return yaml.load(content, Loader)
    except RecursionError:
        raise UserError(f"{file} is nested too deeply") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        # a tag such as !!timestamp before another value, or a number such as 08, raises any of them
        raise UserError(f"{file} is not valid YAML ({' '.join(str(error).split())})") from None


def _from_manifest(manifest: dict[str, Any], file: Path) -> dict[str, Any]:
    """The recipe of a manifest, with the fields that older manifests lack or name differently."""
    recipe = manifest.get("recipe")
    if not isinstance(recipe, dict):
        raise UserError(
            f"{file} holds no recipe: the model was pruned by another program; name a checkpoint that drot "
            "prune wrote"
        )
    sections = {
        name: before | recipe[name]
        for name, before in BEFORE_THE_FIELD.items()
        if isinstance(recipe.get(name), dict)
    }
    rotation = sections.get("rotation", {})
    if "down_basis" in rotation:
        rotation["boundary"] = DOWN_BASIS.get(rotation.pop("down_basis"))
    return recipe | sections
