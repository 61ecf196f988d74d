"""The rooms of drot/: the order of their imports, the imports of `import drot`, and the names in messages."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import drot

PACKAGE = Path(drot.__file__).resolve().parent

#: Imports run downward only: a room imports from rooms above it in this list. A room is a folder of drot/,
#: or a module beside the folders.
ROOMS = [
    "core",
    "config",
    "_C",
    "machine",
    "ops",
    "text",
    "model",
    "calibration",
    "pruning",
    "rotation",
    "sparse",
    "checkpoint",
    "pipeline",
    "evaluation",
    "finetuning",
    "serving",
    "reporting",
    "cli",
    "__main__",
    "__init__",
]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports, inside functions too. Relative imports are not allowed."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_run_one_way() -> None:
    for path in modules():
        room = room_of(path)
        assert room in ROOMS, f"drot/{room} has no place in ROOMS"
        for module in imports_of(path):
            if module.startswith("drot."):
                target = module.split(".")[1]
                assert target in ROOMS, f"{path} imports {module}, which has no place in ROOMS"
                assert ROOMS.index(target) <= ROOMS.index(room), f"{path} imports {module}"


def imports_of_rooms() -> dict[str, set[str]]:
    """Room → the other rooms that it imports, of those that are folders; from the lowest to the highest."""
    imports: dict[str, set[str]] = {room: set() for room in ROOMS if (PACKAGE / room).is_dir()}
    for path in modules():
        if room_of(path) in imports:
            targets = {module.split(".")[1] for module in imports_of(path) if module.startswith("drot.")}
            imports[room_of(path)] |= (targets & imports.keys()) - {room_of(path)}
    return imports


def test_the_rooms_stay_few_and_flat() -> None:
    """A change in a room can reach the rooms above it: the fewer levels, the fewer of them."""
    levels: dict[str, int] = {}
    for room, targets in imports_of_rooms().items():
        levels[room] = 1 + max((levels[target] for target in targets), default=0)
    assert max(levels.values()) <= 8, levels
    assert len(levels) <= 22 and sum(map(len, imports_of_rooms().values())) <= 95


def test_the_diagram_shows_the_imports_of_the_rooms() -> None:
    """CONTRIBUTING.md draws an arrow for each import, but for those that a way of several arrows shows."""
    guide = PACKAGE.parent / "CONTRIBUTING.md"
    if not guide.exists():
        pytest.skip("needs the checkout")
    imports = imports_of_rooms()
    below: dict[str, set[str]] = {}
    for room in imports:
        below[room] = imports[room].union(*(below[target] for target in imports[room]))
    arrows = {
        room: targets - set().union(*(below[target] for target in targets))
        for room, targets in imports.items()
        if targets
    }
    drawn = re.findall(r"^ {4}(\w+)\[.*?\] --> (.*)$", guide.read_text(encoding="utf-8"), re.MULTILINE)
    assert {room: set(targets.split(" & ")) for room, targets in drawn} == arrows


def names_defined_in(path: Path) -> Iterator[str]:
    """The functions, classes, class attributes and instance attributes that a module defines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                targets = line.targets if isinstance(line, ast.Assign) else []
                targets = [line.target] if isinstance(line, ast.AnnAssign) else targets
                yield from (target.id for target in targets if isinstance(target, ast.Name))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_no_room_asks_for_a_later_rooms_attribute_by_name() -> None:
    """With getattr or hasattr, a room could depend on a later room without importing it."""
    first: dict[str, int] = {}
    for path in modules():
        if room_of(path) in ROOMS:
            for name in names_defined_in(path):
                first[name] = min(first.get(name, len(ROOMS)), ROOMS.index(room_of(path)))
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if node.func.id in ("getattr", "hasattr") and isinstance(node.args[1], ast.Constant):
                name = node.args[1].value
                assert first.get(name, 0) <= ROOMS.index(room_of(path)), f"{path} asks for {name!r} by name"


@pytest.mark.parametrize("package", ["ops", "pruning"])
def test_tensor_code_does_not_import_transformers(package: str) -> None:
    for path in (PACKAGE / package).rglob("*.py"):
        assert not any(module.split(".")[0] == "transformers" for module in imports_of(path)), path


def python(code: str) -> str:
    """The stdout of `code` in a new Python process."""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_public_name_is_a_room() -> None:
    """The import of a room would replace the name by the module."""
    assert not {path.stem for path in PACKAGE.iterdir()} & (set(drot.__all__) - {"ops"})


@pytest.mark.parametrize("before", ["", ", torch"])
def test_import_drot_is_quick(before: str) -> None:
    """It imports neither torch nor other libraries whose imports take long."""
    code = f"""
import sys, time{before}
start = time.process_time()
import drot
print(time.process_time() - start, *sorted({{name.partition(".")[0] for name in sys.modules}}))
"""
    seconds, *loaded = python(code).split()
    assert not {
        *(() if before else ("torch", "numpy")),
        "transformers",
        "datasets",
        "rich",
        "typer",
        "safetensors",
        "pydantic",
        "peft",
        "accelerate",
    } & set(loaded)
    assert float(seconds) < 1


def test_library_messages_name_fields_and_not_options() -> None:
    """drot/cli/app.py replaces a field such as `hessians="dense"` by its option, --hessians dense."""
    for path in modules():
        if room_of(path) == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if not called.endswith("Error"):
                continue
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    option = re.search(r"(?<![\w-])--[a-z]", part.value)
                    assert option is None, f"{path}:{part.lineno} has {part.value!r}"


def test_named_files_exist() -> None:
    """The files that comments and docstrings of drot name, and CONTRIBUTING.md outside of its examples."""
    root = Path(__file__).resolve().parents[2]
    texts = {str(path): path.read_text(encoding="utf-8") for path in modules()}
    if (guide := root / "CONTRIBUTING.md").exists():
        texts["CONTRIBUTING.md"] = guide.read_text(encoding="utf-8")
    for where, text in texts.items():
        for name in re.findall(r"(?<![\w/.])\w+/[\w/]*\w\.py\b", text):
            found = (root / name).exists() or (PACKAGE / name).exists()
            assert found or re.search(r"row_norms|/random\.py", name), f"{where} names {name}"


@pytest.mark.slow
@pytest.mark.parametrize("imports", ["drot, torch", "drot.ops.extension, torch"])
def test_import_drot_registers_its_ops_whole(imports: str) -> None:
    """With fake kernels and autograd, not only the kernels of the native module."""
    code = f"""
import {imports}
y = torch.randn(4, 8, requires_grad=True)
torch.ops.drot.entropy_loss(y)[0].backward()
mask = torch.ops.drot.nm_mask(torch.empty(4, 8, device="meta"), 2, 4)
print(y.grad is not None, tuple(mask.shape))
"""
    assert python(code) == "True (4, 8)\n"


@pytest.mark.slow
def test_drot_is_registered_without_the_model_code_and_after_a_failed_import() -> None:
    """lm-eval reads quantization_config before anything imports the code of models."""
    code = """
import sys, importlib.util, drot
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
print("drot" in CONFIG_MAPPING, "transformers.modeling_utils" in sys.modules)
from transformers.quantizers import AutoQuantizationConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
print("drot" in AUTO_QUANTIZATION_CONFIG_MAPPING, "transformers.modeling_utils" in sys.modules)
spec = importlib.util.find_spec("transformers.modeling_utils")
assert spec.loader.get_source("transformers.modeling_utils")
sys.modules["transformers.generation"] = None  # makes the import below fail
try:
    import transformers.modeling_utils
    failed = False
except ImportError:
    failed = True
del sys.modules["transformers.generation"]
import transformers.modeling_utils
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
print(failed, "drot" in AUTO_QUANTIZER_MAPPING)
"""
    assert python(code) == "True False\nTrue False\nTrue True\n"
