"""Registers drot with transformers, so that `from_pretrained` opens drot's checkpoints.

The registration imports the model code of transformers, which takes seconds. `import drot` must be fast and
does not import that code. Instead, it installs an import hook, which registers drot's classes right after the
program itself imports the modules of transformers that look for them.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

#: module of transformers → the module of drot that registers itself when it is imported. The first defines
#: AutoConfig; every `from_pretrained` of a model is defined in the second, or imports the second.
WATCHED = {
    "transformers.models.auto.configuration_auto": "drot.sparse.stored_config",
    "transformers.modeling_utils": "drot.checkpoint.hf_quantizer",
}


def register_with_transformers() -> None:
    """Imports each module of drot in WATCHED now if its key is imported already, else right after the key."""
    for watched, registers in WATCHED.items():
        if watched in sys.modules:
            importlib.import_module(registers)
        elif not any(isinstance(finder, _Finder) and finder.watched == watched for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(watched))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module `watched` through the other finders, and wraps its loader in _Loader."""

    def __init__(self, watched: str) -> None:
        self.watched = watched

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.watched:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Executes a module with its own loader, then imports the module of drot that registers itself."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        self._loader.exec_module(module)
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self._finder]
        importlib.import_module(WATCHED[self._finder.watched])
