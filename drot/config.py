"""The recipe of a run as frozen dataclasses: the only home of its defaults.

The command line takes its defaults from these classes, and the manifest stores them. Each class checks its
values when an object is built. Whether the values fit a model is checked in drot/pipeline/validation.py.
"""

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from drot.errors import UserError

Method = Literal["magnitude", "wanda", "sparsegpt"]
RotationMode = Literal["none", "layer", "shared"]
Objective = Literal["auto", "entropy", "pruned"]
Optimizer = Literal["fast", "paper"]
HessianSource = Literal["sequential", "dense"]
BoundaryPlace = Literal["input", "residual"]
WeightFormat = Literal["dense", "packed"]
ProductDtype = Literal["float32", "bfloat16"]

#: Optimizer → default steps and learning rate. `paper` has the values of the paper (section 4). The values
#: of `fast` were chosen by measurement (benchmarks/README.md).
OPTIMIZER_DEFAULTS: dict[str, tuple[int, float]] = {"fast": (100, 0.3), "paper": (2000, 0.01)}


def _one_of(name: str, value: object, allowed: Any) -> None:
    choices = typing.get_args(allowed)
    if value not in choices:
        raise UserError(f"`{name}` must be one of {', '.join(choices)}; got {value!r}")


def _at_least(name: str, value: float, low: float) -> None:
    if not (isinstance(value, int | float) and math.isfinite(value) and value >= low):
        raise UserError(f"`{name}` must be a finite number of at least {low}; got {value!r}")


def _whole(name: str, value: int, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise UserError(f"`{name}` must be a whole number {allowed}; got {value!r}")


@dataclass(frozen=True)
class Sparsity:
    """The share of the weights that pruning removes.

    ratio: the share, in [0, 1).
    n, m: n:m keeps n of every m neighbouring weights along the input dimension, so ratio is 1 - n/m. Both
        are 0 for a plain ratio, which prescribes no pattern.
    """

    ratio: float
    n: int = 0
    m: int = 0

    @property
    def structured(self) -> bool:
        """True for n:m, False for a plain ratio."""
        return self.m > 0

    @classmethod
    def parse(cls, text: "str | float | Sparsity") -> "Sparsity":
        """Reads `0.5`, `"0.5"`, `"50%"` or `"2:4"`. Raises UserError for anything else."""
        if isinstance(text, Sparsity):
            return text
        expected = "`sparsity` must be a ratio in [0, 1) such as 0.5, or n:m with 0 < n < m <= 32 such as 2:4"
        try:
            if isinstance(text, str) and ":" in text:
                n, m = (int(part) for part in text.split(":"))
                if not 0 < n < m <= 32:
                    raise ValueError
                return cls(ratio=1 - n / m, n=n, m=m)
            if isinstance(text, str) and text.strip().endswith("%"):
                ratio = float(text.strip()[:-1]) / 100
            else:
                ratio = float(text)
            if not 0 <= ratio < 1:
                raise ValueError
        except (TypeError, ValueError):
            raise UserError(f"{expected}; got {text!r}") from None
        return cls(ratio=ratio)

    def __str__(self) -> str:
        return f"{self.n}:{self.m}" if self.structured else f"{self.ratio:g}"


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """The text from which the Hessians are computed.

    Args:
        source: `c4` or `wikitext2`, which the package `datasets` downloads, or a .txt, .json, .jsonl or
            .parquet file.
        nsamples: number of sequences.
        seqlen: tokens in a sequence.
        seed: seed of the positions at which sequences are cut from the text.
        text_column: the column of the text in .json, .jsonl and .parquet files.
    """

    source: str = "c4"
    nsamples: int = 128
    seqlen: int = 2048
    seed: int = 0
    text_column: str = "text"

    def __post_init__(self) -> None:
        _whole("nsamples", self.nsamples, 1)
        _whole("seqlen", self.seqlen, 2)
        _whole("seed", self.seed, 0, 2**64 - 1)  # the range of torch.Generator


@dataclass(frozen=True, kw_only=True)
class RotationConfig:
    """How the orthogonal matrices R1 and R2 are trained (paper, section 3.3).

    Args:
        mode: `layer` trains one R1 for each layer, as the paper does. `shared` trains one R1 for the whole
            model, and the result is a stock checkpoint. `none` rotates nothing.
        blocks: the number of equal diagonal blocks of R1 (appendix F); 1 makes R1 dense. A tuple gives the
            sizes of unequal blocks, which must add up to the hidden size.
        objective: `entropy` is the paper's. `pruned` is the importance of the weights that the mask removes.
            `auto` is `pruned` for n:m and `entropy` for a ratio.
        optimizer: `paper` is Adam on A with R = qr(A). `fast` takes spectral steps in so(n), and
            its rate is the angle of the first step in radians.
        steps: training steps; None is the optimizer's value in OPTIMIZER_DEFAULTS.
        lr: learning rate; None is the optimizer's value in OPTIMIZER_DEFAULTS.
        early_stop: `fast` stops when the loss changes by less than this share of itself a step; 0 never
            stops early.
        hessians: `sequential` computes a layer's Hessians after the layers before it were pruned. `dense`
            computes all Hessians in one pass of the dense model, so that layers train independently;
            `mode="shared"` always does so.
        boundary: where the rotation between layers l and l + 1 acts. `input`, as in the paper: on the input
            of layer l + 1, and down_proj of layer l takes R1(l). `residual`: on the residual of layer l,
            beside its MLP, and down_proj of layer l takes R1(l + 1). down_proj is then trained with layer
            l + 1, whose training figures include it.
        layers_per_step: with `mode="shared"`, the number of layers in the loss of one step; the other
            layers are offloaded to main memory. None is all layers.
        product_dtype: dtype of the matrix products. The loss is computed in fp32 at least.
        reference_compat: computes the SparseGPT scores as the paper's code does, which adds the damping a
            second time, to the inverse.
    """

    mode: RotationMode = "layer"
    blocks: int | tuple[int, ...] = 1
    objective: Objective = "auto"
    optimizer: Optimizer = "fast"
    steps: int | None = None
    lr: float | None = None
    early_stop: float = 1e-5
    hessians: HessianSource = "sequential"
    boundary: BoundaryPlace = "input"
    layers_per_step: int | None = None
    product_dtype: ProductDtype = "float32"
    reference_compat: bool = False

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, RotationMode)
        _one_of("objective", self.objective, Objective)
        _one_of("optimizer", self.optimizer, Optimizer)
        _one_of("hessians", self.hessians, HessianSource)
        _one_of("boundary", self.boundary, BoundaryPlace)
        _one_of("product_dtype", self.product_dtype, ProductDtype)
        if isinstance(self.blocks, list):
            object.__setattr__(self, "blocks", tuple(self.blocks))
        for size in self.blocks if isinstance(self.blocks, tuple) else (self.blocks,):
            _whole("blocks", size, 1)
        if self.steps is not None:
            _whole("steps", self.steps, 0)
        _at_least("early_stop", self.early_stop, 0)
        if self.layers_per_step is not None:
            _whole("layers_per_step", self.layers_per_step, 1)
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise UserError(f"`lr` must be a finite number above 0; got {self.lr!r}")

    @property
    def equal_blocks(self) -> int:
        """The number of equal blocks; 1 for unequal blocks, which are trained inside a dense matrix."""
        return self.blocks if isinstance(self.blocks, int) else 1

    @property
    def resolved_hessians(self) -> str:
        """`hessians`, or `dense` with `mode="shared"`."""
        return "dense" if self.mode == "shared" else self.hessians

    @property
    def resolved_steps(self) -> int:
        """`steps`, or its default."""
        return OPTIMIZER_DEFAULTS[self.optimizer][0] if self.steps is None else self.steps

    @property
    def resolved_lr(self) -> float:
        """`lr`, or its default."""
        if self.lr is not None:
            return self.lr
        return OPTIMIZER_DEFAULTS[self.optimizer][1]


@dataclass(frozen=True, kw_only=True)
class PruningConfig:
    """Which weights are removed, and how.

    method: the score of a weight: `magnitude`, `wanda` or `sparsegpt`.
    sparsity: the share of the weights that is removed, as n:m or as a ratio.
    damping: the share of mean(diag H) that is added to the Hessian's diagonal before the inversion. If the
        Cholesky factorisation fails, the share is multiplied by 10; the manifest records the final share.
    block_size: the number of columns that SparseGPT prunes before it updates the columns right of them.
    """

    method: Method = "sparsegpt"
    sparsity: Sparsity = field(default_factory=lambda: Sparsity.parse("2:4"))
    damping: float = 0.01
    block_size: int = 128

    def __post_init__(self) -> None:
        _one_of("method", self.method, Method)
        object.__setattr__(self, "sparsity", Sparsity.parse(self.sparsity))
        _at_least("damping", self.damping, 0)
        _whole("block_size", self.block_size, 1)
        splits_groups = self.sparsity.structured and self.block_size % self.sparsity.m
        if splits_groups and self.method == "sparsegpt":  # the other methods have no blocks
            raise UserError(
                f"`block_size` must be a multiple of m in n:m; got {self.block_size} with {self.sparsity}"
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings that affect the result of `drot.prune`."""

    rotation: RotationConfig = field(default_factory=RotationConfig)
    pruning: PruningConfig = field(default_factory=PruningConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    @property
    def objective(self) -> str:
        """The objective, with `auto` resolved."""
        if self.rotation.objective != "auto":
            return self.rotation.objective
        return "pruned" if self.pruning.sparsity.structured else "entropy"

    def to_dict(self) -> dict[str, Any]:
        """The recipe in plain JSON types, with every default resolved. A round trip through JSON is exact."""
        out = dataclasses.asdict(self)
        out["pruning"]["sparsity"] = str(self.pruning.sparsity)
        if isinstance(self.rotation.blocks, tuple):
            out["rotation"]["blocks"] = list(self.rotation.blocks)
        out["rotation"]["hessians"] = self.rotation.resolved_hessians
        out["rotation"]["steps"] = self.rotation.resolved_steps
        out["rotation"]["lr"] = self.rotation.resolved_lr
        out["rotation"]["objective"] = self.objective
        return out


#: LoRA or full → default learning rate of `drot.finetune`. LoRA's is the paper's (appendix, "Compatibility
#: with LoRA"), the other was chosen by measurement (benchmarks/README.md).
FINETUNE_LR = {"lora": 2e-4, "full": 5e-5}


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """How `drot.finetune` trains a pruned model. The paper's settings for LoRA are the defaults.

    The paper names neither the batch size nor the epochs. With 1 and 1, its 4096 sequences are 4096 steps.

    Args:
        full: trains all kept weights of the seven linears, their biases and the norms, instead of LoRA.
        keep_adapter: writes LoRA's matrices as an adapter for peft, instead of merging them. An adapter that
            will be merged is trained under the mask, so that the merge is exact; a kept adapter is not.
        rank: r, the number of columns of LoRA's B [out, r] and of rows of its A [r, in].
        alpha: the product B A is multiplied by alpha / rank.
        dropout: the share of LoRA's inputs that is set to 0 in training.
        lr: learning rate; None is the value in FINETUNE_LR.
        weight_decay: weight decay of AdamW.
        warmup_steps: steps in which the learning rate rises to `lr`, before it falls to 0; both are linear.
            None is 400, or a tenth of all steps if that is less.
        epochs: number of passes over the sequences.
        batch_size: sequences in a forward pass of one GPU.
        accumulation: forward passes of one GPU in a step of the optimiser.
        gradient_checkpointing: computes a layer's activations again in the backward pass, which takes less
            memory and more time.
        held_out: number of sequences at the end of the text that are not trained on. Their loss is measured
            before and after.
        text: the training text. Its `seed` is also the seed of LoRA's A, of the dropout and of the order.
    """

    full: bool = False
    keep_adapter: bool = False
    rank: int = 8
    alpha: float = 32.0
    dropout: float = 0.1
    lr: float | None = None
    weight_decay: float = 0.01
    warmup_steps: int | None = None
    epochs: int = 1
    batch_size: int = 1
    accumulation: int = 1
    gradient_checkpointing: bool = False
    held_out: int = 32
    text: CalibrationConfig = field(
        default_factory=lambda: CalibrationConfig(source="wikitext2", nsamples=4096)
    )

    def __post_init__(self) -> None:
        if self.full and self.keep_adapter:
            raise UserError("`full=True` trains no adapter: leave out `full` or `keep_adapter`")
        for name in ("rank", "epochs", "batch_size", "accumulation", "held_out"):
            _whole(name, getattr(self, name), 1)
        if self.warmup_steps is not None:
            _whole("warmup_steps", self.warmup_steps, 0)
        _at_least("weight_decay", self.weight_decay, 0)
        _at_least("dropout", self.dropout, 0)
        if self.dropout >= 1:
            raise UserError(f"`dropout` must be below 1; got {self.dropout!r}")
        for name in ("lr", "alpha"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UserError(f"`{name}` must be a finite number above 0; got {value!r}")

    @property
    def method(self) -> str:
        """`lora` or `full`."""
        return "full" if self.full else "lora"

    @property
    def resolved_lr(self) -> float:
        """`lr`, or its default."""
        return FINETUNE_LR[self.method] if self.lr is None else self.lr

    def resolved_warmup_steps(self, steps: int) -> int:
        """`warmup_steps`, or its default in a training of `steps` steps."""
        return min(400, steps // 10) if self.warmup_steps is None else self.warmup_steps

    def to_dict(self) -> dict[str, Any]:
        """The settings that have an effect, in plain JSON types, without `warmup_steps`."""
        out = dataclasses.asdict(self) | {"lr": self.resolved_lr}
        idle = ("rank", "alpha", "dropout", "keep_adapter") if self.full else ()
        return {name: value for name, value in out.items() if name not in (*idle, "warmup_steps")}
