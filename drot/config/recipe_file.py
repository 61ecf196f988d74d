"""The sections of a recipe in a file: a recipe in YAML or JSON, or the manifest of a checkpoint."""

import re
from pathlib import Path
from typing import Any, ClassVar

from drot.core.checks import shortened
from drot.core.errors import UserError
from drot.core.reading import LARGEST_FILE, read_bytes, strict_json

#: the manifest in the folder of a checkpoint (drot/checkpoint/manifest.py)
MANIFEST = "drot.json"
#: bytes of the largest YAML file, which is slow to read; a drot.json may be larger
LARGEST_YAML = 2**20
#: suffixes of a file of settings
SUFFIXES = (".json", ".yaml", ".yml")


def read_sections(path: str | Path) -> tuple[Path, Any, dict[str, Any]]:
    """The file of a recipe, its sections, and the manifest that holds them; {} if the file is no manifest.

    path: a .yaml, .yml or .json file with a recipe, a drot.json, or the folder of a checkpoint.

    Raises UserError for a file that is missing or broken, and for a manifest without a recipe.
    """
    file = Path(path) / MANIFEST if Path(path).is_dir() else Path(path)
    if file.suffix not in SUFFIXES:
        raise UserError(
            f"`recipe` must be a .yaml or .json file, or a folder that drot prune wrote; got {str(file)!r}"
        )
    data = settings_in(file)
    if not isinstance(data, dict):
        raise UserError(f"{file} must hold the sections of a recipe, got {type(data).__name__}")
    if not data.keys() & {"recipe", "format_version"}:
        return file, data, {}
    if not isinstance(data.get("recipe"), dict):
        raise UserError(
            f"{file} holds no recipe: the model was pruned by another program; name a checkpoint that drot "
            "prune wrote"
        )
    return file, data["recipe"], data


def settings_in(file: Path) -> Any:
    """The content of a file whose suffix is one of SUFFIXES: JSON, or YAML with the scalars of YAML 1.2.

    Raises UserError for a file that is missing or broken, and for a key that stands twice.
    """
    try:
        content = read_bytes(file, LARGEST_FILE if file.suffix == ".json" else LARGEST_YAML).decode(
            "utf-8-sig"
        )
    except UnicodeDecodeError:
        raise UserError(f"{file} must be UTF-8: convert it, for example with iconv -t utf-8") from None
    if file.suffix == ".json":
        try:
            return strict_json(content)
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

        def flatten_mapping(self, node: Any) -> None:
            """Called for each mapping. YAML 1.2 has no merge keys, a few of which make an endless mapping."""
            seen = set()
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:merge":
                    raise yaml.YAMLError(f"line {key.start_mark.line + 1}: merge keys are not read")
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                    line = key.start_mark.line + 1
                    raise yaml.YAMLError(f"line {line}: {shortened(key.value)} stands twice in one mapping")
                seen.add((key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None)

    for tag, pattern in (
        ("null", "|~|null|Null|NULL"),
        ("bool", "true|True|TRUE|false|False|FALSE"),
        ("int", r"[-+]?[0-9]+"),
        ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"),
    ):
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$"), None)
    # PyYAML would take 010 for the number 8
    Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node)))
    try:
        return yaml.load(content, Loader)
    except RecursionError:
        raise UserError(f"{file} is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"{file} is not valid YAML ({line}{error.problem})") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        # a tag such as !!timestamp before another value, or a number such as !!int x, raises any of them
        raise UserError(f"{file} is not valid YAML ({' '.join(str(error).split())})") from None
