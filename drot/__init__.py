"""DenoiseRotator: rotate a language model so that pruning hurts it less."""

from importlib import import_module
from typing import Any

from drot import _extension as _extension
from drot import hf as hf  # importing it registers with transformers
from drot.version import __version__

#: public name -> module that defines it; imported at first use, so that `import drot` stays fast
_PUBLIC = {
    "CalibrationConfig": "drot.config",
    "PruneResult": "drot.pipeline",
    "PruningConfig": "drot.config",
    "Recipe": "drot.config",
    "RotationConfig": "drot.config",
    "Sparsity": "drot.config",
    "UserError": "drot.errors",
    "load": "drot.checkpoint",
    "prune": "drot.pipeline",
}

__all__ = ["__version__", "ops", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module("drot.ops")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'drot' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
