"""How `drot.finetune` trains a pruned model."""

from typing import Self

from pydantic import Field, model_validator

from drot.config.calibration import CalibrationConfig
from drot.config.settings import settings
from drot.core.errors import UserError

#: LoRA or full → default learning rate of `drot.finetune`. LoRA's is the paper's (appendix, "Compatibility
#: with LoRA"), the other was chosen by measurement (benchmarks/README.md).
FINETUNE_LR = {"lora": 2e-4, "full": 5e-5}


@settings
class FinetuneConfig:
    """How `drot.finetune` trains a pruned model. The paper's settings for LoRA are the defaults.

    The paper names neither the batch size nor the epochs. With 1 and 1, its 4096 sequences are 4096 steps.
    """

    full: bool = False
    """Train all kept weights of the decoder layers' linears, and the norms, instead of LoRA. Takes 17 bytes
    of memory a weight, and more for the activations.
    """
    against: str | None = Field(default=None, title="MODEL")
    """Train against this dense model: the loss is KL(dense ‖ pruned) of the next token, in place of the loss
    of the text. It needs the memory of the dense model and the time of its forward passes.
    """
    rank: int = Field(default=8, ge=1)
    """LoRA's rank r: the columns of its matrix B, and the rows of A."""
    alpha: float = Field(default=32.0, gt=0)
    """LoRA's product B A is multiplied by alpha / rank."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Dropout on LoRA's inputs."""
    lr: float | None = Field(default=None, gt=0)
    """Learning rate. Default: 0.0002, with `full` 5e-05."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay of AdamW."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps in which the learning rate rises; it then falls to 0. Default: 400, or a tenth of all steps if
    that is less.
    """
    epochs: int = Field(default=1, ge=1)
    """Passes over the sequences."""
    batch_size: int = Field(default=1, ge=1)
    """Sequences in a forward pass of one GPU."""
    accumulation: int = Field(default=1, ge=1)
    """Forward passes of one GPU in a step of the optimiser."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time."""
    held_out: int = Field(default=32, ge=1)
    """Sequences at the end of the text that are not trained on. Their perplexity is measured before and
    after.
    """
    keep_adapter: bool = False
    """Write LoRA's matrices as an adapter for peft, and do not merge them. An adapter that is merged is
    trained under the mask, so that the merge is exact; a kept adapter is not.
    """
    text: CalibrationConfig = CalibrationConfig(source="wikitext2", nsamples=4096)
    """The training text. Its seed is also that of LoRA's A, of the dropout and of the order."""

    @model_validator(mode="after")
    def _full_has_no_adapter(self) -> Self:
        if self.full and self.keep_adapter:
            raise UserError("`full` trains no adapter: leave out `full` or `keep_adapter`")
        return self

    @property
    def method(self) -> str:
        """`lora` or `full`."""
        return "full" if self.full else "lora"

    @property
    def resolved_lr(self) -> float:
        """`lr`, or its default."""
        return FINETUNE_LR[self.method] if self.lr is None else self.lr

    def resolved_warmup_steps(self, steps: int) -> int:
        """`warmup_steps`, or its default in a training of `steps` steps.

        Raises UserError if the learning rate would not reach `lr` in them.
        """
        if self.warmup_steps is None:
            return min(400, steps // 10)
        if self.warmup_steps >= max(steps, 1):
            raise UserError(
                f"`warmup_steps` must be below the {steps} steps of this training; got {self.warmup_steps}: "
                "lower it, or train for more epochs"
            )
        return self.warmup_steps
