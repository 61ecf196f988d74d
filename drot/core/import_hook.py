"""Registers drot with torch, transformers and lm_eval when a program imports them.

torch must learn drot's ops, transformers must learn to open drot's checkpoints, and lm_eval must find drot's
task. None has an entry point by which it would import an installed package: somebody must import the modules
of drot that register themselves. `import drot` and `drot --help` must be fast, so they cannot import torch
and the others, which take seconds. `import drot` installs an import hook instead. Right after the program
imports torch, or a module with a registry, the hook imports the module of drot that registers there.
"""

import importlib
import importlib.abc
import sys
from types import ModuleType
from typing import Any

#: module with a registry → the module of drot that registers itself there
WATCHED = {
    "torch": "drot.ops",
    "transformers.models.auto.configuration_auto": "drot.checkpoint.stored_config",
    "transformers.quantizers.auto": "drot.checkpoint.hf_model",
    "lm_eval.tasks": "drot.evaluation.lm_eval_tasks",
}


def register_when_imported() -> None:
    """Imports each module of drot in WATCHED now if its key is imported already, else right after the key."""
    for watched, registers in WATCHED.items():
        if watched in sys.modules:
            importlib.import_module(registers)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the keys of WATCHED by the other finders; their loading then imports the values too."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in WATCHED:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((found for found in specs if found is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                importlib.import_module(WATCHED[fullname])

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
