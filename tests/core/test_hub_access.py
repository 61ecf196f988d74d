"""What is read from the hub: without a network in one line and at once; not from a folder of that name."""

import logging
import time

import datasets
import huggingface_hub
import pytest
from huggingface_hub import constants

from drot.checkpoint.opening import load_config
from drot.core import hub
from drot.core.errors import UserError
from drot.text.source import read_text


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """A hub that refuses connections, and empty caches. Returns the delays that the libraries asked for."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (
            lambda: read_text("wikitext2", "test", "text"),
            "cannot read Salesforce/wikitext from the hub (no conn",
        ),
        (lambda: read_text("c4", "train", "text"), "cannot read allenai/c4 from the hub (no connection to"),
        (
            lambda: load_config("owner/name"),
            "the model owner/name cannot be read from the hub (no connection",
        ),
    ],
)
def test_without_a_network(no_network, caplog, capfd, read, message):
    with caplog.at_level(logging.WARNING), pytest.raises(UserError) as caught:
        read()
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not no_network and not caplog.records and capfd.readouterr().err == ""


def test_offline_is_respected(no_network, monkeypatch):
    """With HF_HUB_OFFLINE the hub is not asked at all."""
    asked = []
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: asked.append(1))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        load_config("owner/name")
    assert not asked


def test_the_caches_are_used_without_a_network(no_network, tmp_path):
    """In the block the libraries are offline; afterwards they are as before, also after an exception."""
    with hub.hub_access("problem", "advice"):
        assert constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE
    with pytest.raises(UserError, match="problem"), hub.hub_access("problem", "advice"):
        raise OSError("some reason")
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE


def test_a_hub_that_answers_is_used(monkeypatch):
    class Session:
        def head(self, url, timeout):
            return None

    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub.hub_access("problem", "advice"):
        assert not constants.HF_HUB_OFFLINE
    failing = pytest.raises(UserError, match=r"^problem \(some reason and an explanation\): advice$")
    with failing, hub.hub_access("problem", "advice"):
        raise OSError("some reason\nand an explanation")


def test_a_folder_does_not_shadow_a_dataset(tmp_path, monkeypatch):
    rows = datasets.Dataset.from_dict({"text": ["from the hub"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda **arguments: rows)
    monkeypatch.setattr(hub, "_unreachable", lambda: "")
    monkeypatch.chdir(tmp_path)
    for name in ("c4", "wikitext2"):
        (tmp_path / name).mkdir()
        assert read_text(name, "train", "text") == "from the hub"
    (tmp_path / "allenai" / "c4").mkdir(parents=True)  # which the package datasets reads before the hub
    with pytest.raises(UserError, match="the current folder holds allenai/c4"):
        read_text("c4", "train", "text")
