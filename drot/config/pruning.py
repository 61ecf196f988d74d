"""Which weights are removed, and how the kept weights are computed and trained."""

import dataclasses
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer

from drot.config.settings import settings
from drot.config.sparsity import Sparsity, matches, parse_sparsity_of

Method = Literal["magnitude", "wanda", "sparsegpt"]
#: the methods that score a weight without a Hessian, and so need no calibration text
WITHOUT_HESSIAN: frozenset[Method] = frozenset({"magnitude"})
Solver = Literal["none", "sparsegpt", "pcg", "admm"]
Target = Literal["self", "dense"]
TokenWeighting = Literal["gradient", "equal"]
Recovery = Literal["none", "block"]
#: the average of diag H that is the unit of `damping` (`damping_unit` of drot/calibration/hessian.py)
DampingAverage = Literal["mean", "median"]

#: largest share of diag H that is added to the diagonal: H itself no longer counts
LARGEST_DAMPING = 1e6
#: the default of `damping`, and the default for a run that reproduces a published method: SparseGPT's
DAMPING, PUBLISHED_DAMPING = 0.3, 0.01

#: these accept all that the functions parse, such as "2:4" or {"down_proj": "4:8"}
AnySparsity = Annotated[Sparsity, BeforeValidator(Sparsity.parse), PlainSerializer(str)]
Patterns = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(lambda v: (v,) if isinstance(v, str) else tuple(v) if isinstance(v, list) else v),
]
SparsityOf = Annotated[
    tuple[tuple[str, Sparsity], ...],
    BeforeValidator(parse_sparsity_of),
    PlainSerializer(lambda pairs: [f"{pattern}={sparsity}" for pattern, sparsity in pairs]),
]


@settings
class PruningConfig:
    """Which weights are removed, and how.

    A pattern of `keep` and `sparsity_of` is a glob such as `layers.0.*`, in which * also matches dots. It
    matches a linear by its name, such as `layers.0.self_attn.q_proj`, or by the last part of the name,
    `q_proj`.
    """

    method: Method = "sparsegpt"
    """How the weights to remove are chosen. sparsegpt also updates the weights that it keeps."""
    sparsity: AnySparsity = Sparsity.parse("2:4")
    """n:m (2:4 keeps 2 of every 4 neighbouring weights), or the share of weights to remove (0.5 or 50%)."""
    sparsity_of: SparsityOf = ()
    """Another sparsity for the linears that match a pattern, as in down_proj=4:8 or
    'layers.0.self_attn.*=0.5'. There may be several; the last match is used.
    """
    keep: Patterns = Field(default=(), title="patterns such as layers.0.* or down_proj")
    """Leave the linears that match this pattern dense, as in 'layers.0.*' or down_proj. It may be given
    several times, and overrides `sparsity_of`. The linears are rotated too.
    """
    damping: float | None = Field(default=None, ge=0, le=LARGEST_DAMPING)
    """Share of `damping_average` that is added to the diagonal of H before H is inverted; ten times as much
    if that fails. The larger it is, the less the result depends on the calibration text. Default: 0.3; with
    `mode` none, `optimizer` paper or `reference_compat` it is SparseGPT's: 0.01.
    """
    damping_average: DampingAverage | None = None
    """The average of diag H of which `damping` is a share. Default: median; with `mode` none, `optimizer`
    paper or `reference_compat`: mean.
    """
    block_size: int = Field(default=128, ge=1)
    """SparseGPT only: columns to prune before the columns right of them are updated, rounded to a multiple of
    m in n:m.
    """
    solve: Literal["auto"] | Solver = "auto"
    """How the kept weights are computed. none: as `method` leaves them. sparsegpt: by SparseGPT's sweep. pcg:
    with the smallest error of the outputs, by conjugate gradients. admm: the same, and the mask moves too.
    auto: admm, but none with `mode` none, `optimizer` paper or `reference_compat`, which reproduce published
    methods.
    """
    target: Literal["auto"] | Target = "auto"
    """Outputs that a linear should have. self: its dense outputs on its inputs in the pruned model. dense:
    nearer to its outputs in the dense model. auto: dense, also with `solve` none; self in one shot
    as published, with `mode` none, `optimizer` paper or `reference_compat`.
    """
    target_weight: float = Field(default=0.25, gt=0, le=1)
    """With `target` dense: the share of the way from self to the dense model, up to 1."""
    token_weights: Literal["auto"] | TokenWeighting = "auto"
    """How the calibration tokens count in the Hessians and targets. gradient: by how much the loss of the
    dense model depends on the outputs of a linear at the token, which takes a backward pass. equal: all
    alike, as in published methods. auto: gradient where `solve` is pcg or admm.
    """
    route_all: bool = False
    """In a mixture of experts: compute the Hessians of each expert from all tokens, in place of those that
    the router sends to it.
    """

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

    def for_linear(self, name: str) -> Self:
        """These settings with the sparsity of the linear `name` for all linears."""
        if not self.mixed:
            return self
        return dataclasses.replace(self, sparsity=self.sparsity_for(name), keep=(), sparsity_of=())


@settings
class RecoveryConfig:
    """How the kept weights of a pruned layer are trained (drot/pipeline/recover.py)."""

    recover: Recovery = "none"
    """block: train the kept weights of each pruned layer to have the dense model's outputs. none: train no
    weights.
    """
    recover_epochs: int = Field(default=8, ge=1)
    """Passes over the calibration sequences. Fewer if the error on held-out sequences does not fall."""
    recover_lr: float = Field(default=0.01, gt=0)
    """Largest learning rate, as a share of a matrix's root mean square."""
    recover_batch: int = Field(default=4, ge=1)
    """Sequences in one step."""
    distill_epochs: int = Field(default=0, ge=0)
    """Passes that train the kept weights of all layers together, after the pruning, towards the next tokens
    of the dense model, on further sequences of the calibration text; 0: none. Up to three times as many if
    the text has fewer sequences than that. Left out where the memory does not suffice.
    """
    distill_nsamples: int | None = Field(default=None, ge=0)
    """Sequences of that training, which the pruning has not read. Default, and 0: three times `nsamples`."""
    distill_lr: float = Field(default=5e-4, gt=0)
    """Largest learning rate of that training, as a share of a matrix's root mean square."""
    distill_batch: int = Field(default=2, ge=1)
    """Sequences in one step of that training; at least one for each rank."""
