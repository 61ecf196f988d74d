"""Registers drot's quantizer with transformers, so that `from_pretrained` opens drot's checkpoints.

The registration imports the model code of transformers, which takes seconds. `import drot` must be fast and
does not import that code. Instead, it installs an import hook, which registers the quantizer right after the
program itself imports the model code.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

#: the module that every `from_pretrained` of a model is defined in or imports
WATCHED = "transformers.modeling_utils"
QUANTIZER = "drot.checkpoint.hf_quantizer"


def register_with_transformers() -> None:
    """Registers the quantizer now if WATCHED is imported already, otherwise right after its import."""
    if WATCHED in sys.modules:
        importlib.import_module(QUANTIZER)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds WATCHED through the other finders, and wraps its loader in _Loader."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != WATCHED:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Executes a module with its own loader, then imports QUANTIZER, which registers itself."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        self._loader.exec_module(module)
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        importlib.import_module(QUANTIZER)
