"""`drot serve` without the packages of its extra, and the extra in pyproject.toml."""

import re
import tomllib
from pathlib import Path

import pytest

from drot.cli import app as cli
from drot.serving import requirements

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch, capsys):
    monkeypatch.setattr(requirements, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert cli.run(["serve", "no-such-model"]) == 2
    assert capsys.readouterr().err == "drot: a server needs the package uvicorn: pip install uvicorn\n"


def test_an_older_transformers_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(requirements, "find_spec", lambda name: name)
    monkeypatch.setattr(requirements, "version", lambda name: "5.4.0")
    assert cli.run(["serve", "no-such-model"]) == 2
    assert "needs transformers 5.20 or newer, got 5.4.0" in capsys.readouterr().err


def test_the_extra_has_what_is_checked():
    if not PROJECT.exists():
        pytest.skip("needs the checkout")
    extra = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]["serve"]
    oldest = ".".join(map(str, requirements.OLDEST_TRANSFORMERS))
    assert {re.split("[>=<]", line)[0] for line in extra} == {"transformers", *requirements.PACKAGES}
    assert f"transformers>={oldest},<6" in extra
