"""What the plugins for vLLM and SGLang have in common, without either of them."""

import importlib
import logging
import sys
from types import ModuleType

import pytest
from engines import entry_points, save
from transformers import AutoConfig

import drot
from drot.checkpoint.stored_config import MODEL_TYPE, StoredConfig
from drot.core.errors import UserError
from drot.serving import sglang, vllm


@pytest.mark.parametrize(("plugin", "engine"), [(vllm, "vLLM"), (sglang, "SGLang")])
def test_another_interface_of_an_engine_is_one_line(plugin, engine, monkeypatch, caplog):
    """The rest of the engine goes on, as it does for its other models."""
    module = ModuleType(engine.lower())
    for name in [name for name in sys.modules if name.startswith(f"{engine.lower()}.")]:
        monkeypatch.delitem(sys.modules, name)  # where the engine is installed
    monkeypatch.setitem(sys.modules, engine.lower(), module)
    module.__version__ = "9.0"
    with caplog.at_level(logging.WARNING, "drot"):
        plugin.register()
    (line,) = caplog.messages
    assert f"needs {engine} {plugin.TESTED}, got 9.0" in line and "\n" not in line


@pytest.mark.parametrize("error", [TypeError("register_model() takes 2 arguments"), ValueError("a\nb")])
def test_an_engine_that_refuses_what_the_plugin_registers(error, monkeypatch, caplog):
    """vLLM would end with the error, whatever model it serves."""

    class Engine(ModuleType):
        @property
        def ModelRegistry(self):
            raise error

    monkeypatch.setitem(sys.modules, "vllm", Engine("vllm"))
    with caplog.at_level(logging.WARNING, "drot"):
        vllm.register()
    (line,) = caplog.messages
    assert "got an unknown version" in line and "\n" not in line


@pytest.mark.slow
def test_drot_opens_what_the_plugin_refuses(tmp_path):
    """In one process with vLLM, too, whose plugin has fewer families."""
    save(tmp_path / "saved", "lfm2_moe", {}, "none", {}, "packed")
    AutoConfig.register(MODEL_TYPE, vllm.VllmStoredConfig, exist_ok=True)  # as the plugin does
    try:
        with pytest.raises(UserError, match="has the families llama, mistral, .*, got lfm2_moe"):
            AutoConfig.from_pretrained(tmp_path / "saved")
        assert drot.load(tmp_path / "saved", device="cpu").config.model_type == "lfm2_moe"
    finally:
        AutoConfig.register(MODEL_TYPE, StoredConfig, exist_ok=True)


@pytest.mark.parametrize(
    ("plugin", "group"), [(vllm, "vllm.general_plugins"), (sglang, "sglang.srt.plugins")]
)
def test_the_entry_point_names_the_plugin(plugin, group):
    module, _, name = entry_points(group)["drot"].partition(":")
    assert getattr(importlib.import_module(module), name) is plugin.register
