"""The training itself, by transformers' Trainer: its arguments, its progress, and its messages."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from drot.config import FinetuneConfig
from drot.core.errors import UserError
from drot.core.events import Progress, ProgressEvent
from drot.finetuning.distillation import DivergenceLoss

#: number of points of the loss curve in the manifest
POINTS = 100
#: kinds of processes with which every process holds all weights
ALLOWED = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def training_arguments(
    config: FinetuneConfig, sequences: int, folder: Path, *, cpu: bool, autocast: bool
) -> TrainingArguments:
    """The Trainer's arguments. `max_steps` is the number of the optimiser's steps.

    sequences: the number of training sequences.
    folder: a temporary folder, in which nothing should be written.
    autocast: whether the products are in bfloat16.
    """
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulation,
        **_checkpointing(config),
        num_train_epochs=config.epochs,
        learning_rate=config.resolved_lr,
        lr_scheduler_type="linear",
        weight_decay=config.weight_decay,
        optim="adamw_torch",
        seed=config.text.seed % 2**32,  # numpy's range
        bf16=autocast,
        use_cpu=cpu,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_nan_inf_filter=False,
        dataloader_pin_memory=not cpu,
        ddp_find_unused_parameters=False,
    )
    device = arguments.device  # asking for it finds the GPUs
    arguments._n_gpu = min(1, arguments._n_gpu)  # one process would use every GPU through nn.DataParallel
    if arguments.distributed_state.distributed_type not in ALLOWED:
        kind = arguments.distributed_state.distributed_type.value
        raise UserError(
            f"drot trains with a copy of the model on every GPU; got {kind} on {device}: use accelerate "
            "launch with multi_gpu and neither FSDP nor DeepSpeed"
        )
    batches = math.ceil(sequences / (config.batch_size * arguments.world_size))
    arguments.max_steps = math.ceil(batches / config.accumulation) * config.epochs
    arguments.warmup_steps = config.resolved_warmup_steps(arguments.max_steps)
    arguments.logging_steps = max(1, arguments.max_steps // POINTS)
    return arguments


def _checkpointing(config: FinetuneConfig) -> dict[str, Any]:
    """The Trainer's arguments for gradient checkpointing, which transformers has renamed."""
    if not config.gradient_checkpointing:
        return {}
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    return {name: True, f"{name}_kwargs": {"use_reentrant": False}}


class Reporter(TrainerCallback):
    """Sends ProgressEvents, keeps the loss curve, and stops at a loss that is not finite."""

    def __init__(self, progress: Progress, lr: float) -> None:
        self.progress, self.lr = progress, lr
        #: (step, mean loss of a token since the last point)
        self.curve: list[tuple[int, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            check_loss(logs["loss"], self.lr)
            self.curve.append((state.global_step, logs["loss"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loss = self.curve[-1][1] if self.curve else None
        self.progress(
            ProgressEvent(phase="finetune", step=state.global_step, steps=state.max_steps, loss=loss)
        )


def check_loss(loss: float, lr: float) -> None:
    """Raises UserError if a loss is infinite or NaN."""
    if not math.isfinite(loss):
        raise UserError(f"the training diverged: the loss is {loss} with `lr`, {lr:g}: lower `lr`")


def train(
    model: Any,
    sequences: Tensor,
    arguments: TrainingArguments,
    callbacks: list[TrainerCallback],
    loss: DivergenceLoss | None = None,
) -> None:
    """Trains the trainable weights of `model` on `sequences` [n, seqlen]. The model ends in eval mode.

    Raises UserError for a loss that is not finite.

    loss: None is the model's own, that of the text.
    """
    use_cache = model.config.use_cache
    rows = [{"input_ids": row, "labels": row} for row in sequences]
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows, callbacks=callbacks, compute_loss_func=loss
    )
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train()
    finally:
        model.config.use_cache = use_cache  # the Trainer sets it to False, and a checkpoint would keep that
    trainer.accelerator.wait_for_everyone()
    model.eval().requires_grad_(False)
    model.zero_grad(set_to_none=True)
