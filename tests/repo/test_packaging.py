"""The sdist and its wheel, the image and the matrix of wheels."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import drot

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="needs the sources")


def tracked() -> set[str]:
    """The files that git lists in the checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    return {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()}


@pytest.mark.slow
def test_the_sdist_holds_the_checkout(tmp_path) -> None:
    """A missing source would be found by the first user who installs from the package index."""
    if find_spec("build") is None:
        pytest.skip("needs the package build")
    names, label = tracked(), "torch2.13.cpu"
    checkout = tmp_path / "checkout"
    for name in names:  # a copy, since setuptools writes drot.egg-info beside the sources
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_bytes((ROOT / name).read_bytes())
    code = "import sys, build; build.ProjectBuilder(sys.argv[1]).build('sdist', sys.argv[2])"
    env = os.environ | {"DROT_WHEEL_LABEL": label}
    done = subprocess.run(
        [sys.executable, "-c", code, checkout, tmp_path / "dist"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = (tmp_path / "dist").iterdir()
    root = f"drot-{drot.__version__}+{label}"
    assert sdist.name == f"{root}.tar.gz"
    with tarfile.open(sdist) as archive:
        packed = {name.removeprefix(f"{root}/") for name in archive.getnames()}
    missing = names - packed
    assert {name for name in missing if name not in (".gitignore", ".dockerignore")} == set()
    assert not [name for name in packed if name.endswith((".so", ".pyc"))]


def test_an_editable_install_works_beside_a_clone_named_drot(tmp_path) -> None:
    """In the parent folder of the clone, where Python finds the clone itself as a namespace package."""
    clone, site = tmp_path / "drot", tmp_path / "site"
    skipped = shutil.ignore_patterns("_C*", "__pycache__", "assets")
    shutil.copytree(ROOT / "drot", clone / "drot", ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, clone / name)
    (clone / "setup.py").write_text("from setuptools import setup; setup()")  # without the native module

    def python(*arguments: str, folder: Path) -> str:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    python(
        "-c",
        f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})",
        folder=clone,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = f"import site; site.addsitedir({str(site)!r}); import drot; print(drot.__version__, drot.__file__)"
    assert python("-S", "-c", code, folder=tmp_path).split() == [
        drot.__version__,
        str(clone / "drot/__init__.py"),
    ]


def test_wheels_are_made_for_every_torch_and_python_that_is_admitted() -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())
    matrix = workflow["jobs"]["wheel"]["strategy"]["matrix"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (line for line in project["dependencies"] if line.startswith("torch>"))
    low, high = re.findall(r"2\.(\d+)", torch)
    assert matrix["torch"] == [f"2.{minor}" for minor in range(int(low), int(high))]
    assert project["requires-python"] == f">={matrix['python'][0]}"
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert matrix["python"] == ci["jobs"]["cpu"]["strategy"]["matrix"]["python"]


def test_the_image_installs_what_exists() -> None:
    text = (ROOT / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"/src\[([\w,]+)\]", text)
    # all that users of the image need; `docs` and `dev` are for the checkout
    assert set(extras.split(",")) == set(project["optional-dependencies"]) - {"docs", "dev"}
    (torch,) = re.findall(r"^ARG TORCH=(2\.\d+)", text, flags=re.MULTILINE)
    (range_,) = (line for line in project["dependencies"] if line.startswith("torch>"))
    low, high = re.findall(r"2\.(\d+)", range_)
    assert int(low) <= int(torch.split(".")[1]) < int(high)
    # it is not run by root, and the caches are where any user can write
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", text, flags=re.MULTILINE)
    for name in ("HOME=/cache ", "HF_HOME=/cache/", "DROT_CACHE=/cache/"):
        assert name in text
    (cuda,) = re.findall(r"^ARG CUDA=(\S+)", text, flags=re.MULTILINE)
    assert f"nvidia/cuda:{cuda}-devel" in (ROOT / ".github/workflows/ci.yml").read_text()
