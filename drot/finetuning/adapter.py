"""LoRA through peft, with and without the mask of the pruned weights."""

import warnings
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from drot.config import FinetuneConfig
from drot.model.families import layer_families

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MaskedLora(lora.Linear):
    """y = x (W + D)ᵀ + b with D = M ∘ (alpha/r · B A) and M = (W ≠ 0), so a removed weight stays zero.

    W [out, in] and b are the frozen linear's. In training, D multiplies dropout(x). After the training,
    W + D is the merged weight exactly: what the mask cuts off was never trained.
    """

    lora_A: Any
    lora_B: Any

    @property
    def linear(self) -> Any:
        """The frozen linear, which holds W and b."""
        return self.get_base_layer()

    def get_delta_weight(self, adapter: str) -> Tensor:
        """D [out, in], which peft's `merge` adds to W."""
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        product: Tensor = self.scaling[adapter] * (b @ a)
        return product.masked_fill(self.linear.weight == 0, 0)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        (adapter,) = self.active_adapters
        linear = self.linear
        if not self.training:
            weight = linear.weight + self.get_delta_weight(adapter)
            return functional.linear(x, weight.to(linear.weight.dtype), linear.bias)
        dropped = self.lora_dropout[adapter](x)
        # D is as large as W: the backward pass computes it again instead of keeping it for every linear
        delta = checkpoint(self._times_delta, dropped, adapter, use_reentrant=False, preserve_rng_state=False)
        y: Tensor = linear(x) + delta
        return y

    def _times_delta(self, x: Tensor, adapter: str) -> Tensor:
        return functional.linear(x, self.get_delta_weight(adapter).to(x.dtype))


def add_adapter(model: "PreTrainedModel", config: FinetuneConfig) -> PeftModel:
    """Adds LoRA, with B = 0, to the linears of every decoder layer, and freezes all other weights.

    The last linear of a Mamba has none: kernels for a Mamba read its weight, past an adapter. The matrices A
    and B are fp32. Unless the adapter is kept, its layers are MaskedLora.
    """
    families = layer_families(model.config, model.config.num_hidden_layers)
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft divides it by r
        lora_dropout=config.dropout,
        target_modules=sorted(
            {linear.path for family in families for linear in family.linears if linear.shape[1] != "mamba"}
        ),
    )
    if not config.keep_adapter:
        settings._register_custom_module({nn.Linear: MaskedLora})
    with warnings.catch_warnings():  # peft reads a property that transformers has renamed
        warnings.simplefilter("ignore", FutureWarning)
        adapted = get_peft_model(model, settings)
    assert isinstance(adapted, PeftModel)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


@torch.no_grad()
def merge_adapter(adapted: PeftModel) -> Any:
    """Adds D to every W and returns the model, which has plain linears again."""
    return adapted.merge_and_unload()
