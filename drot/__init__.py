"""DenoiseRotator: rotate a language model so that pruning hurts it less."""

from importlib import import_module
from typing import Any

from drot import ops as ops  # registers fake kernels and autograd of torch.ops.drot.*
from drot.checkpoint.transformers_hook import register_with_transformers
from drot.core.version import __version__

#: public name -> the module that defines it, which is imported at first use so that `import drot` is fast
_PUBLIC = {
    "CalibrationConfig": "drot.config",
    "FinetuneConfig": "drot.config",
    "FinetuneResult": "drot.finetuning.finetune",
    "PruneResult": "drot.pipeline.prune",
    "PruningConfig": "drot.config",
    "Recipe": "drot.config",
    "RecoveryConfig": "drot.config",
    "RotationConfig": "drot.config",
    "SensitivityResult": "drot.pipeline.sensitivity",
    "Sparsity": "drot.config",
    "UserError": "drot.core.errors",
    "apply_artifact": "drot.artifact.apply",
    "export_artifact": "drot.artifact.export",
    "finetune": "drot.finetuning.finetune",
    "load": "drot.checkpoint.load",
    "prune": "drot.pipeline.prune",
    "sensitivity": "drot.pipeline.sensitivity",
}

__all__ = ["__version__", "ops", *sorted(_PUBLIC)]

register_with_transformers()


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'drot' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
