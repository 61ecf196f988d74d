"""The checkout as a contributor meets it: which drot is imported there, and the files around the package."""

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import drot

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(drot.__file__).resolve().parent
SITE_PACKAGES = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})

in_checkout = pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="needs the sources")
not_editable = pytest.mark.skipif(PACKAGE.parent == ROOT, reason="the package is the checkout's own folder")


def test_the_installed_drot_is_the_one_under_test() -> None:
    """Another folder on the path, such as the checkout, would hide the installed package with its own _C."""
    installed = next(iter(metadata.distributions(name="drot", path=SITE_PACKAGES)), None)
    if installed is None:
        pytest.skip("drot is built in place, and not installed")
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    editable = origin.get("dir_info", {}).get("editable", False)
    wanted = ROOT / "drot" if editable else Path(str(installed.locate_file("drot"))).resolve()
    assert wanted == PACKAGE, "the tests import another drot than the one that is installed: install it again"


@in_checkout
@pytest.mark.skipif(PACKAGE.parent != ROOT, reason="drot is not installed editable")
def test_drot_is_imported_in_the_checkout() -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    command = [sys.executable, "-c", "import drot; print(drot.__file__)"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve() == PACKAGE / "__init__.py"


@in_checkout
@not_editable
def test_a_wheel_holds_the_files_of_the_package() -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "drot"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    sources = {name.removeprefix("drot/") for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
    installed = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*") if path.is_file()}
    assert {name for name in installed if not re.search(r"__pycache__|^_C\..*\.so$", name)} == sources


def test_no_code_of_a_checkpoint_is_run() -> None:
    """What SECURITY.md says of drot's own code."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"pickle", "dill", "joblib", "marshal"}, path
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("torch.load", "eval", "exec"), path
                passed = [word.value for word in node.keywords if word.arg == "trust_remote_code"]
                assert all(isinstance(value, ast.Constant) and value.value is False for value in passed), path


def read_yaml(path: str) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / path).read_text())


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@in_checkout
def test_workflow_runs_what_a_contributor_runs() -> None:
    jobs = read_yaml(".github/workflows/ci.yml")["jobs"]
    assert list(jobs) == ["cpu", "cuda"]
    for name, job in jobs.items():
        assert job["steps"][-1] == {"run": f".ci/run {name}"}
    pythons = jobs["cpu"]["strategy"]["matrix"]["python"]
    assert f">={pythons[0]}" == pyproject()["project"]["requires-python"]
    assert pythons == sorted(pythons, key=lambda version: int(version.split(".")[1]))


@in_checkout
def test_hooks_use_the_versions_of_the_dev_extra() -> None:
    dev = pyproject()["project"]["optional-dependencies"]["dev"]
    (repo,) = read_yaml(".pre-commit-config.yaml")["repos"]
    assert [hook["id"] for hook in repo["hooks"]] == ["ruff-check", "ruff-format", "clang-format"]
    for hook in repo["hooks"]:
        assert hook["additional_dependencies"][0] in dev


@in_checkout
def test_oldest_libraries_are_the_lower_ends_of_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    # an extra that needs a newer library than drot itself stands below
    lower = dict(reversed(re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+),<', text)))
    lines = (ROOT / ".ci/oldest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert set(pinned) == set(lower) - {"torch"}
    for name, version in pinned.items():
        assert f"{version}.".startswith(f"{lower[name]}."), name


@in_checkout
def test_forms_and_citation_are_read() -> None:
    for form in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")):
        content = read_yaml(str(form))
        assert content["name"] and content["description"] and content["body"]
    citation = read_yaml("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == pyproject()["project"]["license"]
