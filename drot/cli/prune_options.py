"""The options of `drot prune`: the values, the text in `--help` and the completion of each option.

Each name here belongs to a parameter of the command in drot/cli/prune.py: `TargetWeight` is the option of
`target_weight`. The defaults of the options stand there.
"""

from pathlib import Path
from typing import Annotated, get_args

import typer

from drot import config
from drot.cli.options import (
    CALIBRATION,
    COMPUTE_DTYPE,
    OUTPUT,
    PRUNING,
    RECOVERY,
    ROTATION,
    RUN,
    SEQLEN_DEFAULT,
    SOURCES,
    TEXT_COLUMN,
    option,
)
from drot.config.recipe import FAST_STEPS
from drot.config.rotation import TRAINING_TOKENS
from drot.machine.devices import DTYPES


def rotation_choices() -> list[str]:
    """The values of --rotation that the shell completes."""
    return [*get_args(config.RotationMode), "block:2", "block:4", "block:8"]


def quality_values() -> str:
    """Text with the values that each quality sets."""
    return " ".join(f"{name}: {', '.join(values.values())}." for name, values in config.QUALITIES.items())


def optimizer_defaults(index: int) -> str:
    """Text with the default of each optimizer: the steps (index 0) or the learning rate (index 1)."""
    return ", ".join(f"{values[index]} for {name}" for name, values in config.OPTIMIZER_DEFAULTS.items())


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Name on the Hugging Face hub, or a local folder. Default with --recipe DIR: the model from "
        "which DIR was made.",
        show_default=False,
    ),
]

# ---- panel Pruning -----------------------------------------------------------------------------------

Recipe = Annotated[
    Path | None,
    option(
        PRUNING,
        "Take the settings from this file, a recipe in YAML or JSON or the drot.json of a checkpoint, or "
        "from the folder of a checkpoint. Options next to it replace single settings.",
        metavar="[FILE|DIR]",
    ),
]
Method = Annotated[
    str,
    option(
        PRUNING,
        "How the weights to remove are chosen. sparsegpt also updates the weights that it keeps.",
        choices=get_args(config.Method),
    ),
]
Sparsity = Annotated[
    str,
    option(
        PRUNING,
        "n:m (2:4 keeps 2 of every 4 neighbouring weights), or the share of weights to remove (0.5).",
        metavar="[n:m|RATIO]",
        autocompletion=lambda: ["2:4", "4:8", "0.5"],
    ),
]
SparsityOf = Annotated[
    list[str] | None,
    option(
        PRUNING,
        "Another sparsity for the linears that match a pattern, as in down_proj=4:8 or "
        "'layers.0.self_attn.*=0.5'. It may be given several times; the last match is used.",
        metavar="PATTERN=[n:m|RATIO]",
    ),
]
Keep = Annotated[
    list[str] | None,
    option(
        PRUNING,
        "Leave the linears that match this pattern dense, as in 'layers.0.*' or down_proj. It may be "
        "given several times, and goes before --sparsity-of.",
        metavar="PATTERN",
    ),
]
Damping = Annotated[
    float | None,
    option(
        PRUNING,
        "Share of the median or the mean of diag H that is added to the diagonal of H before it is inverted. "
        "The larger the share is, the less the result depends on the calibration text. Default: "
        f"{config.DAMPING:g}; with --rotation none, --optimizer paper or --reference-compat it is "
        f"SparseGPT's: {config.PUBLISHED_DAMPING:g}.",
    ),
]
DampingAverage = Annotated[
    str | None,
    option(
        PRUNING,
        "The average of diag H of which --damping is a share. Default: median; with --rotation none, "
        "--optimizer paper or --reference-compat: mean.",
        choices=get_args(config.DampingAverage),
    ),
]
BlockSize = Annotated[
    int,
    option(
        PRUNING,
        "SparseGPT only: columns to prune before the columns right of them are updated, rounded to a "
        "multiple of m in n:m.",
    ),
]
Quality = Annotated[
    str | None,
    option(
        PRUNING,
        f"Sets --solve, --target and --recover. {quality_values()} fast also sets --steps to {FAST_STEPS}.",
        choices=tuple(config.QUALITIES),
    ),
]
Solve = Annotated[
    str | None,
    option(
        PRUNING,
        "How the kept weights are computed. none: as --method leaves them. sparsegpt: by SparseGPT's "
        "sweep. pcg: with the smallest error of the outputs, by conjugate gradients. admm: the same, and "
        "the mask moves too. auto: admm, but none with --rotation none, --optimizer paper or "
        "--reference-compat, which reproduce published methods. Default: by --quality, or auto.",
        choices=get_args(config.Solver),
    ),
]
Target = Annotated[
    str | None,
    option(
        PRUNING,
        "Outputs that a linear should have. self: its dense outputs on its inputs in the pruned model. "
        "dense: nearer to its outputs in the dense model. auto: dense, but self where --solve auto is "
        "none. Default: by --quality, or auto.",
        choices=get_args(config.Target),
    ),
]
TargetWeight = Annotated[
    float,
    option(PRUNING, "With --target dense: the share of the way from self to the dense model, up to 1."),
]

# ---- panel Recovery ----------------------------------------------------------------------------------

Recover = Annotated[
    str | None,
    option(
        RECOVERY,
        "block: train the kept weights of each pruned layer to have the dense model's outputs. none: "
        "train no weights. Default: by --quality, or none.",
        choices=get_args(config.Recovery),
    ),
]
RecoverEpochs = Annotated[
    int,
    option(
        RECOVERY,
        "Passes over the calibration sequences. Fewer if the error on held-out sequences does not fall.",
    ),
]
RecoverLr = Annotated[
    float, option(RECOVERY, "Largest learning rate, as a share of a matrix's root mean square.")
]
RecoverBatch = Annotated[int, option(RECOVERY, "Sequences in one step.")]

# ---- panel Rotation ----------------------------------------------------------------------------------

Rotation = Annotated[
    str,
    option(
        ROTATION,
        "Rotations of the residual stream. layer: one for each layer. shared: one for the whole model, "
        "which loads without drot if it is saved dense. block:N: one for each layer, with N equal "
        "diagonal blocks.",
        metavar="[none|layer|shared|block:N]",
        autocompletion=rotation_choices,
    ),
]
Objective = Annotated[
    str,
    option(
        ROTATION,
        "What the training minimises. pruned: the importance of the weights to remove. entropy: the "
        "paper's, which prunes better with --reference-compat if --method is sparsegpt. auto: pruned.",
        choices=get_args(config.Objective),
    ),
]
Optimizer = Annotated[
    str,
    option(
        ROTATION,
        "Optimizer of the training. fast: spectral steps in so(n). paper: Adam through QR.",
        choices=get_args(config.Optimizer),
    ),
]
Steps = Annotated[
    int | None,
    option(
        ROTATION,
        f"Training steps for each layer. Default: {optimizer_defaults(0)}; {FAST_STEPS} with --quality fast.",
    ),
]
Lr = Annotated[
    float | None,
    option(
        ROTATION,
        f"Learning rate; of fast the largest angle of a step in radians. Default: {optimizer_defaults(1)}; "
        f"{config.FAST_ENTROPY_LR} for fast with --objective entropy.",
    ),
]
EarlyStop = Annotated[
    float,
    option(
        ROTATION,
        "fast stops when the loss changes by less than this share in a step. 0 never stops early.",
    ),
]
TrainingTokens = Annotated[
    int | None,
    option(
        ROTATION,
        "Calibration tokens for each channel of the hidden state with which the rotations are trained. 0: "
        f"all tokens, which pruning always reads. Default: {TRAINING_TOKENS}; all with --optimizer paper and "
        "--reference-compat.",
    ),
]
Hessians = Annotated[
    str,
    option(
        ROTATION,
        "The layer inputs from which the training computes its Hessians. sequential: inputs that went "
        "through the pruned layers before. dense: inputs in the dense model, so that layers train "
        "independently of each other. auto: dense with --boundary residual or --rotation shared, "
        "otherwise sequential.",
        choices=get_args(config.HessianSource),
    ),
]
Boundary = Annotated[
    str,
    option(
        ROTATION,
        "Where the rotation between two layers acts. input: on the input of the later layer. residual: "
        "on the residual of the earlier layer, where a packed model computes it together with down_proj; "
        "needs --hessians dense or --rotations. auto: residual with --format packed and one rotation a "
        "layer, unless --hessians is sequential; otherwise input.",
        choices=get_args(config.Boundary),
    ),
]
LayersPerStep = Annotated[
    int | None,
    option(
        ROTATION,
        "With --rotation shared: the number of layers in the loss of one step. The other layers are "
        "offloaded to main memory. Default: all layers.",
    ),
]
ProductDtype = Annotated[
    str,
    option(
        ROTATION,
        "Dtype of the matrix products of the training. auto is bfloat16 on a GPU, and float32 on a CPU.",
        choices=get_args(config.ProductDtype),
    ),
]
ReferenceCompat = Annotated[
    bool,
    option(
        ROTATION,
        "Compute SparseGPT's score as the paper's code does, which adds the damping twice.",
        "--reference-compat",
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

# ---- panel Calibration -------------------------------------------------------------------------------

Calibration = Annotated[
    str,
    option(
        CALIBRATION,
        f"Text from which the Hessians are computed: {SOURCES} --method magnitude with --rotation none "
        "needs no text.",
        metavar="[c4|ORG/NAME|PATH]",
    ),
]
Nsamples = Annotated[int, option(CALIBRATION, "Number of sequences to cut from the text.")]
Seqlen = Annotated[int | None, option(CALIBRATION, f"Tokens in a sequence. {SEQLEN_DEFAULT}")]
Seed = Annotated[int, option(CALIBRATION, "Random seed of the positions at which sequences are cut.")]
TextColumn = Annotated[str, option(CALIBRATION, TEXT_COLUMN)]

# ---- panel Output ------------------------------------------------------------------------------------

Out = Annotated[
    Path | None,
    option(
        OUTPUT,
        "Folder to write. It must be new or empty. Its disk needs space for the checkpoint and, while "
        "the run lasts, for OUT.partial: the finished layers in --dtype, and 8 bytes for each number of "
        "a rotation. Not with --sensitivity.",
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
        choices=get_args(config.WeightFormat),
    ),
]
SaveDtype = Annotated[
    str,
    option(
        OUTPUT,
        "Dtype of the saved weights. auto is the dtype of MODEL.",
        choices=["auto", *DTYPES],
    ),
]

# ---- panel Run ---------------------------------------------------------------------------------------

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
Dtype = Annotated[
    str,
    option(
        RUN,
        COMPUTE_DTYPE,
        choices=["auto", *DTYPES],
    ),
]
Resume = Annotated[
    bool,
    option(
        RUN,
        "Continue an interrupted run with the same --out. A finished run is left as it is.",
        "--resume",
    ),
]
