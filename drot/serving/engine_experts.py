"""The experts of a mixture on one tensor-parallel rank of vLLM or SGLang. Nothing here imports an engine.

The engines' own kernels for experts take neither packed weights nor R3. So the experts stay those of the
model of transformers, and compute as they do after `drot.load` (drot/model/experts.py).

Each rank has an equal part of the channels between gate and up and down_proj of every expert: the rows of
gate and up, the columns of down_proj, and the blocks of R3. The ranks then add their outputs.

To `torch.compile` the experts of a layer are one op. A CUDA graph can hold it if the CPU does not wait in it
(`graphs_hold_experts` in engine_models.py).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from drot.core.errors import UserError
from drot.machine.devices import check_gpu, is_gpu
from drot.model.block_rotation import DOWN_ROTATION
from drot.model.experts import PACKED_PREFIX, ReplacedExperts
from drot.model.family import Family
from drot.model.linear import module_at
from drot.model.mixins import mix, unmix
from drot.serving.shares import Part, check_blocks, check_share, own_parameter
from drot.sparse.experts import SparseExperts
from drot.sparse.packed import check_packed_tensors

#: op(hidden_states, chosen, weights, key) gives what `ReplacedExperts.forward` gives for those experts.
ExpertOp = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


class RankExperts(ReplacedExperts):
    """Mixin in front of a family's class of experts, for those of one rank.

    name: of the experts in the model, for messages. add: adds the outputs of all ranks.
    op: computes the experts. key: by it the op finds this module; the type is that of the op.
    own_rows, own_columns: the part that the rank has of a gate or up [out, in], and of a down_proj [out, in].
    files: the end of the name of a tensor in files that hold each expert by itself, such as `w1.weight` →
        the parameter, and whether it is the second half of its rows.
    together: the parameters that the files hold as one tensor of all experts.
    """

    add: Callable[[Tensor], Tensor]
    op: ExpertOp
    key: Any
    name: str
    own_rows: Part
    own_columns: Part
    files: dict[str, tuple[str, bool]]
    together: set[str]

    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """As ReplacedExperts, with the outputs of all ranks."""
        return self.add(self.op(hidden_states, chosen, weights, self.key))

    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Loads what this rank has of the tensors of a checkpoint, and gives the names of the parameters.

        An engine's loader calls it. weights: the tensors by their names below the experts. Raises UserError
        for a tensor that the experts do not have.
        """
        held = dict(self.named_parameters())
        for name, tensor in weights:
            if name in held:
                held[name].weight_loader(held[name], tensor)
                self.together.add(name)
                yield name
                continue
            expert, _, end = name.partition(".")
            if end not in self.files or self.files[end][0] not in held:
                raise UserError(
                    f"{self.name} has no tensor {name}, which the checkpoint has: config.json or a file of "
                    "weights is of another checkpoint; copy it again"
                )
            name, second = self.files[end]
            weight = held[name].data[int(expert)]
            if name == self.names[-1]:
                weight.copy_(self.own_columns(tensor))
            else:
                weight.chunk(1 + self.has_gate)[second].copy_(self.own_rows(tensor))
            yield name

    def stored_names(self: Any) -> Iterator[str]:
        """The names below the experts that the tensors have in the files which `load_weights` has read."""
        for name, parameter in self.named_parameters():
            ends = [end for end, (own, _) in self.files.items() if own == name]
            if ends and name not in self.together:
                yield from (f"{expert}.{end}" for expert in range(len(parameter)) for end in ends)
            else:
                yield name

    def check_loaded(self: Any) -> None:
        """Raises UserError for a damaged weight, and for a GPU for which drot was not built."""
        for replaced, module in self.named_children():
            if isinstance(module, SparseExperts):
                check_packed_tensors(f"{self.name}.{replaced}", module.values, module.positions)
                if is_gpu(module.values.device):
                    check_gpu(module.values.device, kernels=True)


def expert_op(engine: str, find: Callable[[Any], RankExperts], kind: type = str) -> ExpertOp:
    """The op drot::<engine>_experts. find: gives the experts of a key. kind: the type of a key."""

    @torch.library.custom_op(f"drot::{engine}_experts", mutates_args=())
    def op(hidden_states: Tensor, chosen: Tensor, weights: Tensor, key: kind) -> Tensor:  # type: ignore[valid-type]
        return ReplacedExperts.forward(find(key), hidden_states, chosen, weights)

    @op.register_fake
    def _(hidden_states: Tensor, chosen: Tensor, weights: Tensor, key: Any) -> Tensor:
        return torch.empty_like(hidden_states)

    return op


def divide_experts(
    layer: nn.Module,
    family: Family,
    name: str,
    *,
    rank: int,
    ranks: int,
    add: Callable[[Tensor], Tensor],
    op: ExpertOp,
) -> RankExperts:
    """Lets the experts of an empty layer hold what one of several ranks has of them, uninitialised.

    name: of the experts in the model. Their key is set by the caller.
    add: adds the outputs of all ranks. op: computes the experts.

    Raises UserError for a number of ranks among which the experts cannot be divided.
    """
    assert family.experts is not None
    experts: Any = module_at(layer, family.experts)
    if isinstance(experts, ReplacedExperts):
        unmix(experts)
    mix(experts, RankExperts, family=family)

    def own(dim: int) -> Part:
        def part(tensor: Tensor) -> Tensor:
            if tensor.shape[dim] % ranks:
                raise UserError(
                    f"{name}: the channels of an expert cannot be divided among {ranks} tensor-parallel "
                    "ranks: choose another number of ranks"
                )
            return tensor.chunk(ranks, dim)[rank]

        return part

    def own_rows(dim: int) -> Part:
        halves = 2 if experts.has_gate and not experts.transposed else 1  # else they alternate
        if halves == 1 or ranks == 1:
            return own(dim)
        return lambda tensor: torch.cat([own(dim)(half) for half in tensor.chunk(halves, dim)], dim)

    def own_blocks(tensor: Tensor) -> Tensor:
        of_each = tensor.unflatten(0, (experts.num_experts, -1))
        check_blocks(of_each.shape[1], tensor.shape[-1], ranks)
        return own(1)(of_each).flatten(0, 1)

    first, last = experts.names
    parts: dict[str, Part] = {
        first: own_rows(2 if experts.transposed else 1),
        last: own(1 if experts.transposed else 2),
        f"{first}_bias": own_rows(1),
        f"{last}_bias": lambda bias: bias if rank == 0 else torch.zeros_like(bias),
        f"{DOWN_ROTATION}.weight": own_blocks,
    }
    for packed in ("values", "positions"):
        parts[f"{PACKED_PREFIX}{first}.{packed}"] = own_rows(1)
        parts[f"{PACKED_PREFIX}{last}.{packed}"] = own(2)
    for path, tensor in list(experts.named_parameters()):
        parent, _, attribute = path.rpartition(".")
        setattr(experts.get_submodule(parent), attribute, own_parameter(tensor, parts[path]))
    for module in experts.children():
        if isinstance(module, SparseExperts):
            _, outputs, half = module.values.shape
            check_share(name, 2 * half, outputs)

    ends = {part: file.partition("{}.")[2] for part, file in family.expert_files}
    experts.files = {
        ends[linear.part]: (linear.path.rpartition(".")[2], experts.has_gate and linear.part == "up_proj")
        for linear in family.linears
        if linear.expert == 0 and linear.part in ends
    }
    experts.add, experts.op, experts.name = add, op, name
    experts.own_rows, experts.own_columns, experts.together = own(0), own(1), set()
    return cast(RankExperts, experts)
