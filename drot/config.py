"""The recipe of a run as frozen dataclasses: the only home of its defaults.

The command line takes its defaults from these classes, and the manifest stores them. Each class checks its
values when an object is built. Whether the values fit a model is checked in drot/pipeline/validation.py.
"""

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from drot.errors import UserError

Method = Literal["magnitude", "wanda", "sparsegpt"]
RotationMode = Literal["none", "layer", "shared"]
Objective = Literal["auto", "entropy", "pruned"]
Optimizer = Literal["fast", "paper"]
HessianSource = Literal["sequential", "dense"]
BoundaryPlace = Literal["input", "residual"]
Solver = Literal["auto", "none", "sparsegpt", "pcg", "admm"]
Target = Literal["auto", "self", "dense"]
Recovery = Literal["none", "block"]
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
            `auto` is `pruned`.
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
    solve: how the kept weights are computed on the mask that `method` chose. `none` leaves them as `method`
        does. `sparsegpt` is SparseGPT's sweep. `pcg` minimises the error of the outputs by conjugate
        gradients. `admm` also moves the mask. `auto` is `admm`, but `none` for a run that reproduces a
        published method: with `mode="none"`, `optimizer="paper"` or `reference_compat`.
    target: the outputs that a linear should have. `self`: its dense outputs on the inputs that the pruned
        model computes. `dense`: nearer to the outputs of the dense model, on the dense model's inputs.
        `auto` is `dense`, but `self` for a run that reproduces a published method.
    target_weight: with `target="dense"`, the share of the way from `self` to the dense model, in (0, 1].
    keep: patterns of the linears that stay dense. They are rotated and not pruned.
    sparsity_of: pairs of a pattern and the sparsity of its linears. Strings such as `"down_proj=4:8"` and a
        dict are accepted too.

    A pattern is a glob such as `layers.0.*`, in which * also matches dots. It matches a linear by its name,
    such as `layers.0.self_attn.q_proj`, or by the last part of the name, `q_proj`. `keep` goes before
    `sparsity_of`; of several pairs in `sparsity_of` that match a linear, the last is used.
    """

    method: Method = "sparsegpt"
    sparsity: Sparsity = field(default_factory=lambda: Sparsity.parse("2:4"))
    damping: float = 0.01
    block_size: int = 128
    solve: Solver = "auto"
    target: Target = "auto"
    target_weight: float = 0.25
    keep: tuple[str, ...] = ()
    sparsity_of: tuple[tuple[str, Sparsity], ...] = ()

    def __post_init__(self) -> None:
        _one_of("method", self.method, Method)
        _one_of("solve", self.solve, Solver)
        _one_of("target", self.target, Target)
        _at_least("target_weight", self.target_weight, 0)
        if not 0 < self.target_weight <= 1:
            raise UserError(f"`target_weight` must be above 0 and at most 1; got {self.target_weight!r}")
        object.__setattr__(self, "sparsity", Sparsity.parse(self.sparsity))
        _at_least("damping", self.damping, 0)
        _whole("block_size", self.block_size, 1)
        object.__setattr__(self, "keep", _patterns("keep", self.keep))
        object.__setattr__(self, "sparsity_of", _sparsity_of(self.sparsity_of))
        for sparsity in self.sparsities:
            splits_groups = sparsity.structured and self.block_size % sparsity.m
            if splits_groups and self.method == "sparsegpt":  # the other methods have no blocks
                raise UserError(
                    f"`block_size` must be a multiple of m in n:m; got {self.block_size} with {sparsity}"
                )

    @property
    def mixed(self) -> bool:
        """Whether `keep` or `sparsity_of` treats some linears in another way than the rest."""
        return bool(self.keep or self.sparsity_of)

    @property
    def sparsities(self) -> list[Sparsity]:
        """`sparsity` and the sparsities in `sparsity_of`, each once."""
        return list(dict.fromkeys([self.sparsity, *(sparsity for _, sparsity in self.sparsity_of)]))

    def sparsity_for(self, name: str) -> Sparsity:
        """The sparsity of the linear `name`, such as `layers.0.self_attn.q_proj`; a ratio of 0 if it stays
        dense."""
        if any(matches(pattern, name) for pattern in self.keep):
            return Sparsity(ratio=0.0)
        found = [sparsity for pattern, sparsity in self.sparsity_of if matches(pattern, name)]
        return found[-1] if found else self.sparsity

    def keeps(self, name: str) -> bool:
        """Whether the linear `name` stays dense beside linears that are pruned.

        It is False for all linears of a recipe that removes nothing at all (`sparsity=0`). That recipe trains
        rotations for other recipes.
        """
        return self.mixed and self.sparsity_for(name).ratio == 0

    def for_linear(self, name: str) -> "PruningConfig":
        """These settings with the sparsity of the linear `name` for all linears."""
        if not self.mixed:
            return self
        return dataclasses.replace(self, sparsity=self.sparsity_for(name), keep=(), sparsity_of=())


def matches(pattern: str, name: str) -> bool:
    """Whether a glob matches the name of a linear, or the last part of the name. Case matters."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def _patterns(field: str, value: Any) -> tuple[str, ...]:
    """`value` as a tuple of patterns; a single string is one pattern."""
    patterns = (value,) if isinstance(value, str) else tuple(value)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise UserError(f"`{field}` must be patterns such as layers.0.* or down_proj; got {pattern!r}")
    return patterns


def _sparsity_of(value: Any) -> tuple[tuple[str, Sparsity], ...]:
    """`value`, in one of the forms that PruningConfig accepts, as pairs of a pattern and a Sparsity."""
    items = value.items() if isinstance(value, Mapping) else [value] if isinstance(value, str) else value
    pairs = []
    for item in items:
        pair = tuple(item.rpartition("=")[::2] if isinstance(item, str) else item)
        if len(pair) != 2 or not isinstance(pair[0], str) or not pair[0]:
            raise UserError(f"`sparsity_of` must be PATTERN=SPARSITY such as down_proj=4:8; got {item!r}")
        pattern, sparsity = pair
        try:
            pairs.append((pattern, Sparsity.parse(sparsity)))
        except UserError:
            raise UserError(
                "the sparsity in `sparsity_of` must be a ratio in [0, 1) such as 0.5, or n:m with "
                f"0 < n < m <= 32 such as 2:4; got {sparsity!r} for {pattern}"
            ) from None
    return tuple(pairs)


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """How the kept weights of a pruned layer are trained (drot/pipeline/recover.py).

    recover: `none` trains nothing. `block` trains each layer, right after it is pruned, to have the outputs
        of the dense model at this depth.
    recover_epochs: passes over the calibration sequences. An eighth of the sequences is held out: the
        training stops early if the error on them does not fall any more.
    recover_lr: largest learning rate of Adam.
    recover_batch: sequences in one step.
    """

    recover: Recovery = "none"
    recover_epochs: int = 8
    recover_lr: float = 1e-3
    recover_batch: int = 4

    def __post_init__(self) -> None:
        _one_of("recover", self.recover, Recovery)
        _whole("recover_epochs", self.recover_epochs, 1)
        _whole("recover_batch", self.recover_batch, 1)
        if not (isinstance(self.recover_lr, int | float) and 0 < self.recover_lr < math.inf):
            raise UserError(f"`recover_lr` must be a finite number above 0; got {self.recover_lr!r}")


#: Quality → the fields that it sets. What each quality costs and gives stands in README.md.
QUALITIES: dict[str, dict[str, Any]] = {
    "fast": {"solve": "none", "target": "self", "recover": "none"},
    "balanced": {"solve": "admm", "target": "dense", "recover": "none"},
    "best": {"solve": "admm", "target": "dense", "recover": "block"},
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings that affect the result of `drot.prune`."""

    rotation: RotationConfig = field(default_factory=RotationConfig)
    pruning: PruningConfig = field(default_factory=PruningConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    @property
    def objective(self) -> str:
        """The objective, with `auto` resolved."""
        return "pruned" if self.rotation.objective == "auto" else self.rotation.objective

    @property
    def solve(self) -> str:
        """`solve` of the pruning, with `auto` resolved."""
        return self._resolved("solve")

    @property
    def target(self) -> str:
        """`target` of the pruning, with `auto` resolved."""
        return self._resolved("target")

    def _resolved(self, name: str) -> str:
        """A field of the pruning; for `auto` the value of `balanced`, or of `fast` for a published method."""
        value = str(getattr(self.pruning, name))
        if value != "auto":
            return value
        rotation = self.rotation
        published = rotation.mode == "none" or rotation.optimizer == "paper" or rotation.reference_compat
        return str(QUALITIES["fast" if published else "balanced"][name])

    def with_quality(self, quality: str) -> "Recipe":
        """This recipe with the fields that `quality` sets: `fast`, `balanced` or `best`."""
        if quality not in QUALITIES:
            raise UserError(f"`quality` must be one of {', '.join(QUALITIES)}; got {quality!r}")
        values = QUALITIES[quality]
        return dataclasses.replace(
            self,
            pruning=dataclasses.replace(self.pruning, solve=values["solve"], target=values["target"]),
            recovery=dataclasses.replace(self.recovery, recover=values["recover"]),
        )

    def to_dict(self) -> dict[str, Any]:
        """The recipe in plain JSON types, with every default resolved. A round trip through JSON is exact."""
        out = dataclasses.asdict(self)
        out["pruning"]["sparsity"] = str(self.pruning.sparsity)
        out["pruning"]["keep"] = list(self.pruning.keep)
        out["pruning"]["sparsity_of"] = [f"{pattern}={of}" for pattern, of in self.pruning.sparsity_of]
        if isinstance(self.rotation.blocks, tuple):
            out["rotation"]["blocks"] = list(self.rotation.blocks)
        out["rotation"]["hessians"] = self.rotation.resolved_hessians
        out["rotation"]["steps"] = self.rotation.resolved_steps
        out["rotation"]["lr"] = self.rotation.resolved_lr
        out["rotation"]["objective"] = self.objective
        out["pruning"] |= {"solve": self.solve, "target": self.target}
        return out


#: LoRA or full → default learning rate of `drot.finetune`. LoRA's is the paper's (appendix, "Compatibility
#: with LoRA"), the other was chosen by measurement (benchmarks/README.md).
FINETUNE_LR = {"lora": 2e-4, "full": 2e-5}


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
