"""Which weights are removed, and how the kept weights are computed and trained."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

from drot.config.sparsity import Sparsity, matches, parse_patterns, parse_sparsity_of
from drot.core.checks import above_zero, at_least, one_of, whole_number
from drot.core.errors import UserError

Method = Literal["magnitude", "wanda", "sparsegpt"]
Solver = Literal["auto", "none", "sparsegpt", "pcg", "admm"]
Target = Literal["auto", "self", "dense"]
Recovery = Literal["none", "block"]
#: the average of diag H that is the unit of `damping` (`damping_unit` of drot/calibration/hessian.py)
DampingAverage = Literal["mean", "median"]


#: largest share of diag H that is added to the diagonal: H itself no longer counts beside it
LARGEST_DAMPING = 1e6
#: the default of `damping`, and the default for a run that reproduces a published method: SparseGPT's
DAMPING, PUBLISHED_DAMPING = 0.3, 0.01


@dataclass(frozen=True, kw_only=True)
class PruningConfig:
    """Which weights are removed, and how.

    method: the score of a weight: `magnitude`, `wanda` or `sparsegpt`.
    sparsity: the share of the weights that is removed, as n:m or as a ratio.
    damping: the share of an average of diag H that is added to the Hessian's diagonal before the inversion.
        The larger the share is, the less the result depends on the calibration text. If the Cholesky
        factorisation fails, the share is multiplied by 10; the manifest records the final share. None is
        DAMPING, but PUBLISHED_DAMPING for a run that reproduces a published method: with `mode="none"`,
        `optimizer="paper"` or `reference_compat`.
    damping_average: the average, `mean` or `median`. None is `median`, but `mean` for a run that reproduces a
        published method.
    block_size: the number of columns that SparseGPT prunes before it updates the columns right of them. It is
        rounded to a multiple of each m in n:m: `resolved_block_size`.
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
    damping: float | None = None
    damping_average: DampingAverage | None = None
    block_size: int = 128
    solve: Solver = "auto"
    target: Target = "auto"
    target_weight: float = 0.25
    keep: tuple[str, ...] = ()
    sparsity_of: tuple[tuple[str, Sparsity], ...] = ()

    def __post_init__(self) -> None:
        one_of("method", self.method, Method)
        one_of("solve", self.solve, Solver)
        one_of("target", self.target, Target)
        at_least("target_weight", self.target_weight, 0)
        if not 0 < self.target_weight <= 1:
            raise UserError(f"`target_weight` must be above 0 and at most 1; got {self.target_weight!r}")
        object.__setattr__(self, "sparsity", Sparsity.parse(self.sparsity))
        if self.damping is not None:
            at_least("damping", self.damping, 0, LARGEST_DAMPING)
        if self.damping_average is not None:
            one_of("damping_average", self.damping_average, DampingAverage)
        whole_number("block_size", self.block_size, 1)
        object.__setattr__(self, "keep", parse_patterns("keep", self.keep))
        object.__setattr__(self, "sparsity_of", parse_sparsity_of(self.sparsity_of))

    @property
    def resolved_block_size(self) -> int:
        """`block_size`, rounded down to a common multiple of every m in n:m, or up if it is smaller.

        A block that splits a group of m columns would prune the group twice.
        """
        multiple = math.lcm(*(sparsity.m for sparsity in self.sparsities if sparsity.structured))
        return max(self.block_size // multiple, 1) * multiple

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
        """These settings with the sparsity of the linear `name` for all linears, and the same blocks."""
        if not self.mixed:
            return self
        return dataclasses.replace(
            self,
            sparsity=self.sparsity_for(name),
            keep=(),
            sparsity_of=(),
            block_size=self.resolved_block_size,
        )


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """How the kept weights of a pruned layer are trained (drot/pipeline/recover.py).

    recover: `none` trains nothing. `block` trains each layer, right after it is pruned, to have the outputs
        of the dense model at this depth.
    recover_epochs: passes over the calibration sequences. An eighth of the sequences is held out: the
        training stops early if the error on them does not fall any more.
    recover_lr: largest learning rate of Adam, as a share of the root mean square of a matrix's kept weights.
    recover_batch: sequences in one step.
    """

    recover: Recovery = "none"
    recover_epochs: int = 8
    recover_lr: float = 0.01
    recover_batch: int = 4

    def __post_init__(self) -> None:
        one_of("recover", self.recover, Recovery)
        whole_number("recover_epochs", self.recover_epochs, 1)
        whole_number("recover_batch", self.recover_batch, 1)
        above_zero("recover_lr", self.recover_lr)
