"""What the plugins for vLLM and SGLang share: which linears are packed, how they load and how they compute.

A packed checkpoint names `<linear>.values` and `<linear>.positions` (drot/sparse/packed.py). Both tensors
have one row for each output, and their columns divide with the inputs. So the loaders of both engines stack
them (q, k and v; gate and up) and divide them among tensor-parallel ranks as they do with a dense weight.

The classes here stand in front of an engine's own base class, and import no engine.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drot.checkpoint.quantization_config import QUANT_METHOD, DrotConfig
from drot.core.errors import UserError
from drot.machine.devices import check_gpu, is_gpu
from drot.ops import sparse24_compress, sparse24_linear
from drot.serving.shares import check_share
from drot.sparse.linear import PACKABLE_DTYPES, compresses
from drot.sparse.packed import check_packed_tensors


class PackedConfig:
    """Mixin for an engine's quantisation config. It says which linears are packed.

    engine: the name of the engine, for messages. drot: the keys of the checkpoint's `quantization_config`.
    dense: the linears that are not packed, and the modules in which they are.
    """

    engine: str

    def __init__(self, drot: DrotConfig) -> None:
        super().__init__()
        self.drot, self.dense = drot, set(drot.dense_linears)

    def get_name(self) -> str:
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return list(PACKABLE_DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json has the keys

    def parts_of(self, prefix: str, mapping: Mapping[str, list[str]]) -> list[str] | None:
        """The packed linears of the checkpoint, such as `layers.0.mlp.up_proj`, that make `prefix`.

        None if they are dense. mapping: the name of a stacked linear → the names of its parts. Raises
        UserError if drot left only a part of them dense.
        """
        path, _, name = prefix.removeprefix("model.").rpartition(".")
        parts = [".".join(filter(None, (path, part))) for part in mapping.get(name, [name])]
        dense = [part for part in parts if part in self.dense]
        if dense and len(dense) < len(parts):
            raise UserError(
                f"{self.engine} computes {', '.join(parts)} as one product, and drot packed only some of "
                "them: keep all or none of them dense, or serve this checkpoint by `drot serve`"
            )
        return parts if self.drot.packed and not dense else None


class PackedLinearMethod:
    """Mixin for an engine's linear method: y = x Wᵀ + b with a packed 2:4 weight W, by drot's op.

    parameter: the engine's class of weights that it stacks and divides. prefix: the name of the linear, for
    messages.
    """

    parameter: Any

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Any,
        **_: Any,
    ) -> None:
        """Declares values [out, in/2] in `params_dtype` and positions uint8 [out, in/8] of this rank.

        Raises UserError if the kernels do not take the rank's share of the inputs or outputs.
        """
        inputs, outputs = input_size_per_partition, sum(output_partition_sizes)
        check_share(self.prefix, inputs, outputs)
        for name, columns, dtype in (
            ("values", inputs // 2, params_dtype),
            ("positions", inputs // 8, torch.uint8),
        ):
            data = torch.empty(outputs, columns, dtype=dtype)
            parameter = self.parameter(data=data, input_dim=1, output_dim=0, weight_loader=weight_loader)
            layer.register_parameter(name, parameter)

    @torch.no_grad()
    def process_weights_after_loading(self, layer: Any) -> None:
        """Checks the weight, and makes the compressed form that a GPU takes for many tokens (`compresses`).

        Raises UserError for a damaged weight, and for a GPU for which drot was not built.
        """
        values, positions = (
            nn.Parameter(w.data, requires_grad=False) for w in (layer.values, layer.positions)
        )
        layer.values, layer.positions = values, positions  # without the engine's loaders
        check_packed_tensors(self.prefix, values, positions)
        if is_gpu(values.device):
            check_gpu(values.device, kernels=True)
        compressed = sparse24_compress(values, positions) if compresses() else None
        kept = compressed is not None and compressed.numel() > 0
        layer.register_buffer("compressed", compressed if kept else None, persistent=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out], both in the dtype of values."""
        return sparse24_linear(x, layer.values, layer.positions, bias, compressed=layer.compressed)
