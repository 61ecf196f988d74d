"""What the plugins for vLLM and SGLang have in common, without either of them."""

import importlib
import logging
import sys
from types import ModuleType

import pytest
from engines import entry_points

from drot.serving import sglang, vllm


@pytest.mark.parametrize(("plugin", "engine"), [(vllm, "vLLM"), (sglang, "SGLang")])
def test_another_interface_of_an_engine_is_one_line(plugin, engine, monkeypatch, caplog):
    """The rest of the engine goes on, as it does for its other models."""
    name = engine.lower()
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(plugin, "version", {name: "9.0"}.get)
    with caplog.at_level(logging.WARNING, "drot"):
        plugin.register()
    (line,) = caplog.messages
    assert f"needs {engine} {plugin.TESTED}, got 9.0" in line and "\n" not in line


@pytest.mark.parametrize(
    ("plugin", "group"), [(vllm, "vllm.general_plugins"), (sglang, "sglang.srt.plugins")]
)
def test_the_entry_point_names_the_plugin(plugin, group):
    module, _, name = entry_points(group)["drot"].partition(":")
    assert getattr(importlib.import_module(module), name) is plugin.register
