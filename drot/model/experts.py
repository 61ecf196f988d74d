"""How the experts of a mixture compute, and what can stand in the place of their weights.

transformers has the weights of all experts in two parameters of one module: that of gate and up, and that of
down. A layer calls the module with its tokens, the experts of each token, and the weights of their outputs.
"""

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from drot.machine.devices import is_gpu
from drot.model.block_rotation import (
    DOWN_ROTATION,
    SILU,
    SILU_FUNCTION,
    BlockRotation,
    gated_activation,
    rows_of,
)
from drot.model.family import Family
from drot.model.mixins import Mixin, mix, unmix
from drot.ops.sparse24_experts import fits_kernel_of_experts

#: Prefix of the name of a module in the place of a parameter of experts, also in the tensor names of a
#: checkpoint. transformers divides a tensor with the name of the parameter when it saves a model.
PACKED_PREFIX = "packed_"


def gated(experts: nn.Module, family: Family, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The inputs of down_proj [..., n] from the outputs of gate and up [..., n], or of up alone."""
    act: Any = getattr(experts, "act_fn", None)
    if up is None:
        result: Tensor = act(gate)
    elif family.gated is not None:
        result = getattr(experts, family.gated)(torch.stack([gate, up], -1).flatten(-2))
    else:
        result = act(gate) * up
    return result


class ReplacedExperts(Mixin):
    """Mixin in front of a family's class of experts, for a module some of whose parameters were replaced, or
    that holds R3.

    In the place of a parameter is a module of its name with PACKED_PREFIX in front. It is called with the
    inputs [rows, in] of all experts, the ends of each expert's rows [experts], and the biases [experts, out]
    or None. It returns the outputs [rows, out].

    names: the stock names of the two parameters. has_gate: whether the first holds gate and up. transposed:
        whether they are [experts, in, out], and the outputs of gate and up alternate.
    """

    family: Family
    names: tuple[str, ...]
    has_gate: bool
    transposed: bool
    #: transformers draws parameters by their names unless a module says that it needs none
    _is_hf_initialized = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not hasattr(cls, "family"):  # a mixin itself
            return
        linears = [linear for linear in cls.family.linears if linear.expert == 0]
        cls.names = tuple(dict.fromkeys(linear.path.rpartition(".")[2] for linear in linears))
        cls.has_gate, cls.transposed = len(linears) > len(cls.names), linears[0].transposed

    def forward(self: Any, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden_states [tokens, d], chosen experts and their weights [tokens, k] -> [tokens, d]."""
        of_pairs, order = chosen.flatten().sort(stable=True)
        # a GPU computes what is packed without a wait of the CPU for its numbers
        experts = torch.arange(self.num_experts, device=of_pairs.device)
        ends = torch.searchsorted(of_pairs, experts, right=True, out_int32=True)
        first, last = self.names
        outputs = self._products(first, hidden_states[order // chosen.shape[1]], ends)
        halves = outputs.chunk(1 + self.has_gate, -1)
        if self.transposed:
            halves = outputs[:, 0::2], outputs[:, 1::2]
        outputs = self._products(last, self._inputs_of_down(*halves, ends=ends), ends)
        weighted = outputs * weights.flatten()[order, None]
        # no index_add_, which adds in an order of its own on a GPU
        by_token = torch.empty_like(weighted)
        by_token[order] = weighted
        return by_token.unflatten(0, chosen.shape).sum(1).to(hidden_states.dtype)

    @property
    def waits(self: Any) -> bool:
        """Whether the CPU waits for the numbers of tokens without gradients, so that no graph can hold it.

        It does for dense weights, for R3 after another activation than SiLU, and for what a GPU's kernel for
        experts does not take.
        """
        replaced: list[Any] = [getattr(self, PACKED_PREFIX + name, None) for name in self.names]
        if None in replaced or (hasattr(self, DOWN_ROTATION) and not self._rotates_in_one_op):
            return True
        return any(
            is_gpu(each.values.device) and not fits_kernel_of_experts(each.values) for each in replaced
        )

    @property
    def _activation(self: Any) -> Any:
        """The activation of gate. LFM2 calls SiLU as a function; gpt-oss has none that is called alone."""
        act = getattr(self, "act_fn", None)
        return SILU_FUNCTION if act is nn.functional.silu else act

    @property
    def _rotates_in_one_op(self: Any) -> bool:
        return self.has_gate and self.family.gated is None and isinstance(self._activation, SILU)

    def _products(self: Any, name: str, x: Tensor, ends: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out], where expert e has the rows up to ends[e]."""
        replaced, biases = getattr(self, PACKED_PREFIX + name, None), getattr(self, f"{name}_bias", None)
        if replaced is not None:
            outputs: Tensor = replaced(x, ends, biases)
            return outputs
        weights = getattr(self, name)
        return torch.cat(
            [
                nn.functional.linear(
                    rows,
                    weights[expert].T if self.transposed else weights[expert],
                    None if biases is None else biases[expert],
                )
                for expert, (rows,) in rows_of(ends, x)
            ]
        )

    def _inputs_of_down(self: Any, gate: Tensor, up: Tensor | None = None, *, ends: Tensor) -> Tensor:
        """`gated`, rotated by R3 if the experts have it."""
        rotation: BlockRotation | None = getattr(self, DOWN_ROTATION, None)
        if rotation is None:
            if up is None or self.family.gated is not None:
                return gated(self, self.family, gate, up)
            return gated_activation(gate, up, self._activation)
        if up is not None and self._rotates_in_one_op:
            return rotation.of_experts(gate, up, ends)
        inputs = gated(self, self.family, gate, up)
        return torch.cat([rotation.of_expert(rows, expert) for expert, (rows,) in rows_of(ends, inputs)])


def replace_weights(layer: nn.Module, family: Family, path: str, module: nn.Module) -> None:
    """Puts `module` in the place of the parameter of experts at `path` in a decoder layer."""
    parent, _, name = path.rpartition(".")
    experts: Any = attrgetter(parent)(layer)
    delattr(experts, name)
    setattr(experts, PACKED_PREFIX + name, module)
    fit_experts(experts, family)


def restore_weights(experts: Any, replaced: str, weights: Tensor) -> None:
    """Undoes `replace_weights`.

    replaced: the name of the module in `experts`. weights: [experts, out, in].
    """
    delattr(experts, replaced)
    parameter = weights.mT.contiguous() if experts.transposed else weights
    setattr(experts, replaced.removeprefix(PACKED_PREFIX), nn.Parameter(parameter, requires_grad=False))
    fit_experts(experts, experts.family)


def fit_experts(experts: Any, family: Family) -> None:
    """Makes experts ReplacedExperts while they hold R3 or replaced weights, and not otherwise."""
    names = [name for name, _ in experts.named_children()]
    held = DOWN_ROTATION in names or any(name.startswith(PACKED_PREFIX) for name in names)
    if held and not isinstance(experts, ReplacedExperts):
        mix(experts, ReplacedExperts, family=family)
    elif not held and isinstance(experts, ReplacedExperts):
        unmix(experts)
