"""The fine-tuning of a loaded model by transformers' Trainer, its held-out loss, and the record of it."""

import dataclasses
import logging
import math
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

from drot.config import FinetuneConfig
from drot.core.errors import BrokenModelError, UserError
from drot.core.events import Progress, ProgressEvent
from drot.evaluation.perplexity import perplexity
from drot.finetuning.distillation import DivergenceLoss
from drot.finetuning.masks import KeepMask, choose_full, removed_weights, round_trained
from drot.machine.devices import dtype_name
from drot.machine.environment import device_name, machine, versions
from drot.model.dtypes import stored_dtype, stored_floats
from drot.pipeline.identity import calibration_record

logger = logging.getLogger("drot")

#: number of points of the loss curve in the manifest
POINTS = 100
#: kinds of processes with which every process holds all weights
ALLOWED = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def run_finetuning(
    model: Any,
    config: FinetuneConfig,
    texts: tuple[Tensor, Tensor],
    folder: Path,
    *,
    dense: Any = None,
    cpu: bool,
    progress: Progress,
) -> tuple[Any, dict[str, Any]]:
    """The trained model in its own dtype, and the record of the run.

    With `keep_adapter`, the model is a PeftModel, and the weights keep the dtype of the training.

    Raises UserError for a model without a finite held-out loss, and for a training that diverges.

    model: the pruned model with dense weights, on the CPU.
    texts: training sequences [n, seqlen] and held-out sequences [h, seqlen].
    folder: a temporary folder.
    dense: the model against which is trained (`load_dense`); None trains on the text.
    cpu: whether to train on the CPU.
    """
    started = time.perf_counter()
    sequences, held_out = texts
    dtype = model.dtype
    autocast = not cpu and dtype != torch.float32 and torch.cuda.is_bf16_supported()
    arguments = training_arguments(config, len(sequences), folder, cpu=cpu, autocast=autocast)
    device = arguments.device
    if device.type == "cpu" or config.full or not autocast:
        for parameter in model.parameters():  # model.float() would also cast buffers
            parameter.data = parameter.data.float()
    model.to(device)
    if dense is not None:
        dense = dense.float() if device.type == "cpu" else dense
        dense.to(device)
    before = _loss(model, held_out, progress)
    if not math.isfinite(before):
        raise UserError(
            f"the model's loss on the held-out text is {before}: its weights are damaged, prune again"
        )
    set_seed(arguments.seed)
    reporter = Reporter(progress, config.resolved_lr)
    loss = None if dense is None else DivergenceLoss(dense)
    model = _train(model, config, dtype, sequences, arguments, reporter, loss)
    after = _loss(model, held_out, progress)
    check_loss(after, config.resolved_lr)
    if after > before:
        logger.warning(
            "the model is worse on the held-out text after the fine-tuning: its loss rose from %.4f to %.4f. "
            "Lower the learning rate or the epochs, or take more text",
            before, after,
        )  # fmt: skip
    if not config.keep_adapter:
        for name, tensor in stored_floats(model):
            tensor.data = tensor.data.to(stored_dtype(model, name, dtype))
    text = dataclasses.replace(config.text, seqlen=sequences.shape[1])
    warmup = config.resolved_warmup_steps(arguments.max_steps)
    record = {
        "settings": dataclasses.replace(config, lr=config.resolved_lr, warmup_steps=warmup, text=text),
        "text": calibration_record(sequences),
        "steps": arguments.max_steps,
        "processes": arguments.world_size,
        "loss_curve": [list(point) for point in reporter.curve],
        "held_out": {
            **calibration_record(held_out),
            "loss_before": before,
            "loss_after": after,
            "perplexity_before": math.exp(before),
            "perplexity_after": math.exp(after),
        },
        "dtype": dtype_name(dtype),
        "device": device_name(device),
        "machine": machine(device),
        "versions": versions(),
        "seconds": time.perf_counter() - started,
    }
    return model, record


def _train(
    model: Any,
    config: FinetuneConfig,
    dtype: torch.dtype,
    sequences: Tensor,
    arguments: Any,
    reporter: "Reporter",
    loss: DivergenceLoss | None,
) -> Any:
    """The trained model, rounded to `dtype` unless the adapter is kept."""
    removed = removed_weights(model)
    if config.full:
        choose_full(model)
        train(model, sequences, arguments, [reporter, KeepMask(removed)], loss)
    else:
        from drot.finetuning.adapter import add_adapter, merge_adapter  # needs peft, which `full` does not

        removed = {name: mask.cpu() for name, mask in removed.items()}  # not needed during the training
        model = add_adapter(model, config)
        train(model, sequences, arguments, [reporter], loss)
        if config.keep_adapter:
            return model
        model = merge_adapter(model)
    round_trained(model, removed, dtype)
    return model


def _loss(model: Any, held_out: Tensor, progress: Progress) -> float:
    """The mean loss of a token of `held_out` [h, seqlen]; NaN for a model without a finite loss."""
    try:
        return math.log(perplexity(model, held_out.flatten(), seqlen=held_out.shape[1], progress=progress))
    except BrokenModelError:
        return math.nan


# ---- the training itself -------------------------------------------------------------------------------


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
    # accelerate's own configuration would change it
    arguments.mixed_precision = "bf16" if autocast else "no"
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
