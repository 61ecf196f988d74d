"""The inputs of a layer's linears in the dense model, beside their inputs in the pruned model."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drot.architectures import Architecture, layer_linears, module_at
from drot.calibration.hessian import HessianAccumulator
from drot.calibration.stream import CalibrationStream

#: the linears whose outputs are added to the residual stream
ADDED_TO_RESIDUAL = ("o_proj", "down_proj")


@dataclass(frozen=True)
class TargetStatistics:
    """Sums over the calibration tokens, in the scale of a Hessian, (2/n) Σ.

    x is the input of a linear in the pruned model, x_dense in the dense model. r and r_dense are the residual
    streams that the linear's output is added to.

    hessian: H = (2/n) Σ x xᵀ [in, in].
    input_change: C = (2/n) Σ (x_dense - x) xᵀ [in, in].
    residual_change: E = (2/n) Σ (r_dense - r) xᵀ [out, in]; None if the output is not added to the stream.
    """

    hessian: Tensor
    input_change: Tensor
    residual_change: Tensor | None


@dataclass(frozen=True)
class DenseReference:
    """A layer that is not pruned, and its inputs in the dense model, in the basis of the pruned layer."""

    layer: nn.Module
    stream: CalibrationStream

    @torch.no_grad()
    def statistics(
        self, pruned: nn.Module, stream: CalibrationStream, index: int, role: str, arch: Architecture
    ) -> TargetStatistics:
        """The statistics of one linear of the layer.

        Args:
            pruned: the layer that is being pruned.
            stream: its inputs.
            index: number of the layer.
            role: role of the linear.
            arch: family of the model.
        """
        linear = layer_linears(pruned, arch)[role]
        size, device = linear.in_features, stream.device
        hessian = HessianAccumulator(size, device)
        change = torch.zeros(size, size, device=device)
        residual = torch.zeros(linear.out_features, size, device=device)
        for batch in stream.batches():
            seen = [
                _observe(layer, role, arch, source.batch(batch), source.layer_kwargs[index])
                for layer, source in ((pruned, stream), (self.layer, self.stream))
            ]
            (x, rest), (x_dense, rest_dense) = seen
            hessian.add(x)
            rows = x.flatten(0, 1).float()
            change.addmm_((x_dense.float() - x.float()).flatten(0, 1).T, rows)
            if rest is not None and rest_dense is not None:
                residual.addmm_((rest_dense.float() - rest.float()).flatten(0, 1).T, rows)
        scale = 2.0 / len(stream.hidden_states)
        return TargetStatistics(hessian.hessian(), change * scale, None if rest is None else residual * scale)


class _Enough(Exception):
    """Ends a forward pass when everything that was asked for has been seen."""


def _observe(
    layer: nn.Module, role: str, arch: Architecture, inputs: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """The input of a linear, and the residual stream that its output is added to (ADDED_TO_RESIDUAL).

    The residual is the sum behind the linear minus the linear's output. So a rotation of the residual, which
    the layer may hold, is part of it.
    """
    linear, found = layer_linears(layer, arch)[role], {}

    def see_input(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        found["input"] = args[0]
        if role not in ADDED_TO_RESIDUAL:
            raise _Enough

    def see_output(module: nn.Module, args: Any, output: Tensor) -> None:
        found["output"] = output

    def see_sum(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        found["sum"] = args[0]
        raise _Enough

    with _removed_afterwards() as handles:
        handles.append(linear.register_forward_pre_hook(see_input))
        handles.append(linear.register_forward_hook(see_output))
        if role == "o_proj":
            handles.append(module_at(layer, arch.mlp_norm).register_forward_pre_hook(see_sum))
        with contextlib.suppress(_Enough):
            found["sum"] = layer(inputs, **kwargs)
    return found["input"], found["sum"] - found["output"] if "sum" in found else None


@contextlib.contextmanager
def _removed_afterwards() -> Iterator[list[Any]]:
    """A list of hook handles, which are removed at the end of the block."""
    handles: list[Any] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()
