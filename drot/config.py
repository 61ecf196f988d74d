"""The recipe of a run, as frozen dataclasses: the only home of every default.

The command line derives its options from these classes, the manifest stores them, and every
check of a single value is made here, once, when the object is built.
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
DownBasis = Literal["own", "next"]
ProductDtype = Literal["float32", "bfloat16"]

#: steps and learning rate where the user names none; those of `paper` are the paper's (section 4),
#: those of `fast` were chosen by measurement (benchmarks/README.md).
OPTIMIZER_DEFAULTS: dict[str, tuple[int, float]] = {"fast": (200, 0.03), "paper": (2000, 0.01)}
#: learning rate of `fast` for one R1 that all layers share
SHARED_LR = 0.02


def _one_of(name: str, value: object, allowed: Any) -> None:
    choices = typing.get_args(allowed)
    if value not in choices:
        raise UserError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def _at_least(name: str, value: float, low: float) -> None:
    if not (isinstance(value, int | float) and math.isfinite(value) and value >= low):
        raise UserError(f"{name} must be a finite number of at least {low}; got {value!r}")


def _whole(name: str, value: int, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise UserError(f"{name} must be a whole number {allowed}; got {value!r}")


@dataclass(frozen=True)
class Sparsity:
    """Which share of the weights goes: `n:m` keeps n of every m neighbours along the input
    dimension; a plain ratio (0.5) removes that share, wherever the weights lie."""

    ratio: float
    n: int = 0
    m: int = 0

    @property
    def structured(self) -> bool:
        """True for n:m."""
        return self.m > 0

    @classmethod
    def parse(cls, text: "str | float | Sparsity") -> "Sparsity":
        """From `0.5`, `"0.5"`, `"50%"` or `"2:4"`. Raises UserError on anything else."""
        if isinstance(text, Sparsity):
            return text
        expected = "sparsity must be a ratio in [0, 1) such as 0.5, or n:m with 0 < n < m <= 32 such as 2:4"
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
    """Which text the Hessians come from.

    source: `c4`, `wikitext2` (through `datasets`), a txt/json/jsonl/parquet file, or, from Python,
        a tensor of token ids [nsamples, seqlen].
    """

    source: str = "c4"
    nsamples: int = 128
    seqlen: int = 2048
    seed: int = 0
    text_column: str = "text"

    def __post_init__(self) -> None:
        _whole("nsamples", self.nsamples, 1)
        _whole("seqlen", self.seqlen, 2)
        _whole("seed", self.seed, 0, 2**64 - 1)  # what torch.Generator takes


@dataclass(frozen=True, kw_only=True)
class RotationConfig:
    """How the orthogonal matrices are trained (paper, section 3.3).

    mode: `none`, `layer` (the paper: one R1 a layer) or `shared` (one R1 for the whole model, whose
        result is a stock checkpoint).
    blocks: R1 is block-diagonal (appendix F) with that many equal blocks, 1 is dense; or the sizes of
        unequal blocks, whose sum is the hidden size.
    objective: `entropy` (the paper), `pruned` (the importance that the mask will remove) or `auto`:
        pruned for n:m, entropy for a ratio.
    optimizer: `paper` (Adam on A through QR) or `fast` (Adam in the tangent space of SO(n)).
    steps, lr: None takes OPTIMIZER_DEFAULTS, or SHARED_LR.
    early_stop: `fast` ends when the loss moves by less than this share of it a step; 0 never does.
    hessians: `sequential` (inputs that passed the pruned layers) or `dense` (all from one pass of
        the dense model, so that layers train independently); `shared` always takes the dense ones.
    down_basis: where down_proj is trained and pruned: in its `own` layer's basis (the paper: the boundary
        rotation stands in front of the next layer) or in the `next` layer's (it acts on the residual
        alone, beside the MLP); the figures of a layer's training then are with the down_proj of the layer
        before, those of the last one with its own too.
    layers_per_step: with `shared`, a step looks at so many layers only, the rest wait in main memory;
        None is all of them.
    product_dtype: dtype of the matrix products; the loss is always fp32 at least.
    reference_compat: score of SparseGPT as the paper's code computes it, with the damping added a
        second time, onto the inverse.
    """

    mode: RotationMode = "layer"
    blocks: int | tuple[int, ...] = 1
    objective: Objective = "auto"
    optimizer: Optimizer = "fast"
    steps: int | None = None
    lr: float | None = None
    early_stop: float = 1e-5
    hessians: HessianSource = "sequential"
    down_basis: DownBasis = "own"
    layers_per_step: int | None = None
    product_dtype: ProductDtype = "float32"
    reference_compat: bool = False

    def __post_init__(self) -> None:
        _one_of("rotation", self.mode, RotationMode)
        _one_of("objective", self.objective, Objective)
        _one_of("optimizer", self.optimizer, Optimizer)
        _one_of("hessians", self.hessians, HessianSource)
        _one_of("down_basis", self.down_basis, DownBasis)
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
            raise UserError(f"lr must be a finite number above 0; got {self.lr!r}")

    @property
    def equal_blocks(self) -> int:
        """The number of equal blocks; unequal ones are trained inside a dense matrix."""
        return self.blocks if isinstance(self.blocks, int) else 1

    @property
    def resolved_hessians(self) -> str:
        return "dense" if self.mode == "shared" else self.hessians

    @property
    def resolved_steps(self) -> int:
        return OPTIMIZER_DEFAULTS[self.optimizer][0] if self.steps is None else self.steps

    @property
    def resolved_lr(self) -> float:
        if self.lr is not None:
            return self.lr
        if self.mode == "shared" and self.optimizer == "fast":
            return SHARED_LR
        return OPTIMIZER_DEFAULTS[self.optimizer][1]


@dataclass(frozen=True, kw_only=True)
class PruningConfig:
    """What is removed and how.

    damping: share of mean(diag H) added to the Hessian's diagonal before it is inverted; a failed
        Cholesky multiplies it by 10, and the manifest says so.
    block_size: columns that SparseGPT solves before it propagates their error to the rest.
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
        split = self.sparsity.structured and self.block_size % self.sparsity.m
        if split and self.method == "sparsegpt":  # the others have no blocks
            raise UserError(
                f"block_size must be a multiple of m in n:m; got {self.block_size} and {self.sparsity}"
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the result of `drot.prune`."""

    rotation: RotationConfig = field(default_factory=RotationConfig)
    pruning: PruningConfig = field(default_factory=PruningConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    @property
    def objective(self) -> str:
        """The objective after `auto` is resolved."""
        if self.rotation.objective != "auto":
            return self.rotation.objective
        return "pruned" if self.pruning.sparsity.structured else "entropy"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, equal to themselves after a round trip, with every default spelled out."""
        out = dataclasses.asdict(self)
        out["pruning"]["sparsity"] = str(self.pruning.sparsity)
        if isinstance(self.rotation.blocks, tuple):
            out["rotation"]["blocks"] = list(self.rotation.blocks)
        out["rotation"]["hessians"] = self.rotation.resolved_hessians
        out["rotation"]["steps"] = self.rotation.resolved_steps
        out["rotation"]["lr"] = self.rotation.resolved_lr
        out["rotation"]["objective"] = self.objective
        return out
