"""The memory of a fine-tuning in full, before it begins."""

import logging
from typing import TYPE_CHECKING

import torch

from drot.checkpoint.size import size_text
from drot.core.errors import UserError
from drot.finetuning.masks import pruned_linears
from drot.machine.devices import free_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("drot")

#: bytes of a trained weight in fp32: itself, its gradient, and Adam's two moments
TRAINED = 4 + 4 + 8
#: bytes of a weight that is not trained, in fp32
FROZEN = 4


def full_memory(model: "PreTrainedModel") -> int:
    """The least bytes on the device for a training of all kept weights: without activations.

    16 bytes for each weight of the decoder layers' linears and norms, and 1 for the mask of a linear's
    weight; 4 for each other weight, such as the embedding's.
    """
    masks = sum(linear.weight.numel() for _, linear in pruned_linears(model))
    linears = sum(p.numel() for _, linear in pruned_linears(model) for p in linear.parameters())
    norms = sum(p.numel() for name, p in model.named_parameters() if name.endswith("norm.weight"))
    trained = linears + norms
    frozen = sum(parameter.numel() for parameter in model.parameters()) - trained
    return masks + TRAINED * trained + FROZEN * frozen


def check_full_memory(model: "PreTrainedModel", device: torch.device) -> None:
    """Says how much memory a training of all kept weights takes. Raises UserError if `device` has less."""
    needed, free = full_memory(model), free_memory(device)
    if needed > free:
        raise UserError(
            f"`full` needs at least {size_text(needed)} of memory on {device}, which has {size_text(free)}: "
            "leave it out to train LoRA, or use a larger device"
        )
    logger.warning(
        "a training of all kept weights takes at least %s of the %s on %s, and more for the activations",
        size_text(needed), size_text(free), device,
    )  # fmt: skip
