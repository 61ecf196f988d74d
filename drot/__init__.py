"""DenoiseRotator: rotate a language model so that pruning hurts it less."""

from importlib import import_module
from typing import Any

from drot.core.import_hook import register_when_imported
from drot.core.version import __version__

#: public name -> the module that defines it, which is imported at first use: `import drot` and `drot --help`
#: need no torch
_PUBLIC = {
    "BrokenModelError": "drot.core.errors",
    "CalibrationConfig": "drot.config",
    "ComparedModel": "drot.reporting.compare",
    "Comparison": "drot.reporting.compare",
    "DEMO": "drot.reporting.demo",
    "FinetuneConfig": "drot.config",
    "FinetuneResult": "drot.finetuning.finetune",
    "KeepMask": "drot.finetuning.masks",
    "PruneResult": "drot.pipeline.prune",
    "PruningConfig": "drot.config",
    "Recipe": "drot.config",
    "RecoveryConfig": "drot.config",
    "Report": "drot.reporting.write",
    "RotationConfig": "drot.config",
    "SensitivityResult": "drot.pipeline.sensitivity",
    "Sparsity": "drot.config",
    "SweepResult": "drot.reporting.sweep",
    "UserError": "drot.core.errors",
    "apply_artifact": "drot.checkpoint.artifact.apply",
    "compare": "drot.reporting.compare",
    "convert": "drot.checkpoint.convert",
    "evaluate": "drot.evaluation.evaluate",
    "export_artifact": "drot.checkpoint.artifact.export",
    "finetune": "drot.finetuning.finetune",
    "load": "drot.checkpoint.load",
    "measure_speed": "drot.evaluation.speed",
    "prune": "drot.pipeline.prune",
    "report": "drot.reporting.write",
    "sample": "drot.pipeline.own_text",
    "sensitivity": "drot.pipeline.sensitivity",
    "sweep": "drot.reporting.sweep",
}

__all__ = ["__version__", "ops", *sorted(_PUBLIC)]

register_when_imported()


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module("drot.ops")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'drot' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
