"""The options of `drot prune`: those that set the recipe, from its fields, and the options of a run.

Each name such as `SaveDtype` is the option of the parameter `save_dtype` of the command.
"""

from pathlib import Path
from typing import Annotated, get_args

import typer

from drot.cli.options import (
    CALIBRATION,
    COMPUTE_DTYPE,
    OUTPUT,
    PRUNING,
    RECOVERY,
    ROTATION,
    RUN,
    SOURCES,
    option,
)
from drot.cli.settings import options_of
from drot.config import QUALITIES, Recipe, RotationMode, WeightFormat
from drot.config.rotation import FAST_STEPS
from drot.machine.devices import DTYPES

DEFAULT = Recipe()
#: the options that set fields of the recipe, by section; what is named here differs from the field
PRUNING_OPTIONS = options_of(
    DEFAULT.pruning,
    PRUNING,
    sparsity={"metavar": "[n:m|RATIO]", "autocompletion": lambda: ["2:4", "4:8", "0.5"]},
    sparsity_of={"metavar": "PATTERN=[n:m|RATIO]"},
    keep={"metavar": "PATTERN"},
)
RECOVERY_OPTIONS = options_of(DEFAULT.recovery, RECOVERY)
ROTATION_OPTIONS = options_of(
    DEFAULT.rotation,
    ROTATION,
    leave_out=("blocks",),  # part of --rotation
    mode={
        "name": "rotation",
        "metavar": "[none|layer|shared|block:N]",
        "autocompletion": lambda: [*get_args(RotationMode), "block:2", "block:4", "block:8"],
        "help": "Rotations of the residual stream. layer: one for each layer. shared: one for the whole "
        "model, which loads without drot if it is saved dense. block:N: one for each layer, with N equal "
        "diagonal blocks.",
    },
)
CALIBRATION_OPTIONS = options_of(
    DEFAULT.calibration,
    CALIBRATION,
    source={
        "name": "calibration",
        "metavar": "[c4|ORG/NAME|PATH]",
        "help": f"Text from which the Hessians are computed: {SOURCES} --method magnitude with --rotation "
        "none needs no text.",
    },
)

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Name on the Hugging Face hub, or a local folder. Default with --recipe DIR: the model from "
        "which DIR was made.",
        show_default=False,
    ),
]
RecipeFile = Annotated[
    Path | None,
    option(
        PRUNING,
        "Take the settings from this file, a recipe in YAML or JSON or the drot.json of a checkpoint, or "
        "from the folder of a checkpoint. Options next to it replace single settings.",
        metavar="[FILE|DIR]",
    ),
]
QUALITY_VALUES = " ".join(f"{name}: {', '.join(values.values())}." for name, values in QUALITIES.items())
Quality = Annotated[
    str | None,
    option(
        PRUNING,
        f"Sets --solve, --target and --recover. {QUALITY_VALUES} fast also sets --steps to {FAST_STEPS}.",
        choices=tuple(QUALITIES),
    ),
]
Rotations = Annotated[
    Path | None,
    option(ROTATION, "Use the rotations in this file, which --save-rotations wrote, and train none."),
]
SaveRotationsTo = Annotated[
    Path | None,
    option(
        ROTATION,
        "Also write the rotations to this file, to use them again with another sparsity or method.",
        "--save-rotations",
    ),
]
Out = Annotated[
    Path | None,
    option(
        OUTPUT,
        "Folder to write. It must be new or empty. Its disk needs space for the checkpoint and, while "
        "the run lasts, for OUT.partial: the finished layers in --dtype, and 8 bytes for each number of "
        "a rotation. Not with --sensitivity.",
    ),
]
DryRun = Annotated[
    bool,
    option(
        OUTPUT,
        "Load no weights and write nothing. Print every setting of the run and what it needs: disk, memory, "
        "calibration tokens and time.",
        "--dry-run",
    ),
]
Sensitivity = Annotated[
    bool,
    option(
        OUTPUT,
        "Write no model. Print the output error of each linear at 2:4, 4:8, 50 % and the sparsities of "
        "this command line, which helps to choose --keep and --sparsity-of. The rotations are trained "
        "for the sparsities of this command line, in the dense model.",
        "--sensitivity",
    ),
]
Format = Annotated[
    str,
    option(
        OUTPUT,
        "Format of the saved weights. packed stores the values and positions of 2:4 weights, in 9/16 of "
        "the bytes of bf16; dense stores all weights, with their zeros.",
        choices=get_args(WeightFormat),
    ),
]
SaveDtype = Annotated[
    str,
    option(OUTPUT, "Dtype of the saved weights. auto is the dtype of MODEL.", choices=["auto", *DTYPES]),
]
Device = Annotated[
    str,
    option(
        RUN,
        "Device to use. auto is the first GPU, or the CPU if there is no GPU. With --hessians dense also "
        "several GPUs, as in cuda:0,cuda:1.",
        metavar="[auto|cpu|cuda:N]",
        autocompletion=lambda: ["auto", "cpu", "cuda", "cuda:0,cuda:1"],
    ),
]
Dtype = Annotated[str, option(RUN, COMPUTE_DTYPE, choices=["auto", *DTYPES])]
Resume = Annotated[
    bool,
    option(
        RUN,
        "Continue an interrupted run with the same --out. A finished run is left as it is.",
        "--resume",
    ),
]
