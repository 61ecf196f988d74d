"""How `drot.finetune` trains a pruned model."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from drot.config.calibration import CalibrationConfig
from drot.core.checks import above_zero, at_least, is_a, whole_number
from drot.core.errors import UserError

#: LoRA or full → default learning rate of `drot.finetune`. LoRA's is the paper's (appendix, "Compatibility
#: with LoRA"), the other was chosen by measurement (benchmarks/README.md).
FINETUNE_LR = {"lora": 2e-4, "full": 5e-5}


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
        is_a("text", self.text, CalibrationConfig)
        for name in ("full", "keep_adapter", "gradient_checkpointing"):
            is_a(name, getattr(self, name), bool)
        if self.full and self.keep_adapter:
            raise UserError("`full=True` trains no adapter: leave out `full` or `keep_adapter`")
        for name in ("rank", "epochs", "batch_size", "accumulation", "held_out"):
            whole_number(name, getattr(self, name), 1)
        if self.warmup_steps is not None:
            whole_number("warmup_steps", self.warmup_steps, 0)
        at_least("weight_decay", self.weight_decay, 0)
        at_least("dropout", self.dropout, 0)
        if self.dropout >= 1:
            raise UserError(f"`dropout` must be below 1; got {self.dropout!r}")
        for name in ("lr", "alpha"):
            value = getattr(self, name)
            if value is not None:
                above_zero(name, value)

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

    def to_dict(self) -> dict[str, Any]:
        """The settings that have an effect, in plain JSON types, without `warmup_steps`."""
        out = dataclasses.asdict(self) | {"lr": self.resolved_lr}
        idle = ("rank", "alpha", "dropout", "keep_adapter") if self.full else ()
        return {name: value for name, value in out.items() if name not in (*idle, "warmup_steps")}
