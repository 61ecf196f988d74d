"""What drot adds to the models of transformers: DrotModel, and the quantizer that opens drot's checkpoints.

| what transformers must learn                      | how                                                   |
|---------------------------------------------------|-------------------------------------------------------|
| `model_type` drot, and the family's config for it | AutoConfig.register (stored_config.py)                |
| `quantization_config` of `quant_method` drot      | register_quantization_config (here)                   |
| rotations and packed linears of an empty model    | register_quantizer (here)                             |
| to import drot's classes after `import drot`      | no entry point: import hook (core/import_hook.py)     |
| the forward of a layer that holds a rotation      | no registry: RotatedLayer (drot/model/boundary.py)    |
| to save drot.json, the card and the stored config | no registry: DrotModel (here)                         |

`AutoModelForCausalLM.register` cannot bring in DrotModel: it finds the class of a model by the class of its
config, and peft, AutoTokenizer and the Trainer need the config of the family. Nor does it reach a model that
`drot.prune` changes in memory. So `as_drot_model` changes the class of a model, in this one place.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import cached_file

from drot.checkpoint.card import CARD, read_card, save_card
from drot.checkpoint.integrity import files_in, folder_records
from drot.checkpoint.manifest import MANIFEST, CheckpointManifest, read_any_manifest, write_manifest
from drot.checkpoint.quantization_config import (
    QUANT_METHOD,
    STORED_DTYPES,
    DrotConfig,
    drot_config_of_modules,
    expect_stored,
    format_of,
)
from drot.checkpoint.recount import recount
from drot.checkpoint.source import check_headers, read_headers, shapes_of, stored_state
from drot.checkpoint.stored_config import write_stored_form
from drot.core.errors import UserError
from drot.machine.devices import dtype_name
from drot.model.block_rotation import DOWN_ROTATION
from drot.model.boundary import ROTATION_MODULE, check_rotations
from drot.model.decoder import DecoderModel
from drot.model.experts import ReplacedExperts
from drot.model.families import declared
from drot.model.mixins import Mixin, mix
from drot.model.multimodal import MULTIMODAL, experts_in_files, language_config, stored_names
from drot.model.stored import follow_files
from drot.sparse.fused import fuse
from drot.sparse.linear import NOT_TRAINABLE, compresses, is_packed, packed_weights
from drot.sparse.packed import check_packed, compress_model, unpack_model

#: arguments of `save_pretrained` and `push_to_hub` that are for the upload and the card
HUB_ARGUMENTS = {
    *("repo_id", "private", "token", "revision", "tags"),
    *("commit_message", "commit_description", "create_pr"),
}


class DrotModel(Mixin):
    """Mixin in front of a family's class, for a model that drot has changed or that has a manifest.

    With another name than that of the stock class, the Trainer would smooth labels without the shift of a
    language model.

    drot_files: drot.json and the text of the card, of a model that was loaded with a manifest.
    """

    drot_files: tuple[CheckpointManifest, str] | None = None

    def save_pretrained(
        self: Any,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> Any:
        """`save_pretrained` of transformers. It also writes drot.json, the card and the config's stored form.

        The entries of drot.json on format, dtype and zeros describe the model as it is now (`recount`). The
        other figures of the layers are those of the loaded checkpoint.
        """
        hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS & kwargs.keys() if push_to_hub}
        repo_id, tags = hub.pop("repo_id", ""), hub.pop("tags", ())
        entry = _describe_in_config(self)
        family = declared(self.config)
        if state_dict is None and any(
            family.name_in_files(f"{norm}.") != f"{norm}." for norm in family.norms
        ):
            # transformers would also rename the part `input_layernorm` of `rotated_input_layernorm`
            state_dict, kwargs["save_original_format"] = stored_state(self), False
        before = _times(Path(save_directory))
        if (quantizer := getattr(self, "hf_quantizer", None)) is not None:
            quantizer.state_dict_to_save = state_dict  # transformers asks it, and forgets those of its caller
        try:
            super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)  # type: ignore[misc]
        finally:
            if quantizer is not None:
                quantizer.state_dict_to_save = None
        if is_main_process:
            folder = Path(save_directory)
            config = folder / "config.json"
            if entry is not None and config.exists():  # an adapter is saved without the config
                write_stored_form(config)
            self._write_files(folder, repo_id, tags)
            if push_to_hub:
                written = [name for name, time in _times(folder).items() if before.get(name) != time]
                return _upload(folder, repo_id or folder.name, written, **hub)
        return None

    def push_to_hub(self: Any, repo_id: str, **arguments: Any) -> Any:
        """`push_to_hub` of transformers, which also uploads drot.json and the card."""
        if self.drot_files is None:
            return super().push_to_hub(repo_id, **arguments)  # type: ignore[misc]
        with tempfile.TemporaryDirectory() as folder:
            return self.save_pretrained(folder, push_to_hub=True, repo_id=repo_id, **arguments)

    def _write_files(self: Any, folder: Path, name: str, tags: Sequence[str]) -> None:
        """Writes the card and drot.json to `folder`, where the model was saved."""
        if self.drot_files is None:
            return
        kept, before = self.drot_files
        format, stock = format_of(self)
        changes = {"format": format, "stock_architecture": stock, "dtype": dtype_name(self.dtype)}
        manifest = kept.model_copy(update=changes, deep=True)
        # what lies in folders, as the checkpoints of a training do, is of other models
        own = [name for name in files_in(folder) if "/" not in name or name.endswith(".jinja")]
        manifest.files = folder_records(folder, [name for name in own if name != MANIFEST])
        recount(folder, self, manifest, kept)
        if not (folder / CARD).exists() and before:
            (folder / CARD).write_text(before, encoding="utf-8")
        save_card(folder, manifest, name, tags)
        manifest.files |= folder_records(folder, [CARD])
        write_manifest(folder, manifest)

    def train(self: Any, mode: bool = True) -> Any:
        """`train` of the module. Raises UserError, and changes nothing, if a part is packed."""
        if mode and is_packed(self):
            raise UserError(NOT_TRAINABLE)
        return super().train(mode)  # type: ignore[misc]

    def dequantize(self: Any, dtype: Any = None) -> Any:
        """Makes packed linears dense, in place, and returns the model. Rotations stay.

        dtype: the dtype of the result. None leaves the dtype as it is.
        """
        # as trainable as the other weights: from_pretrained makes them trainable, drot.load freezes them
        trainable = self.get_input_embeddings().weight.requires_grad
        for name in unpack_model(self):
            self.get_submodule(name).requires_grad_(trainable)
        _describe_in_config(self)
        return self if dtype is None else self.to(dtype)


def as_drot_model(model: Any) -> None:
    """Makes `model` a DrotModel, in place. Its config then describes its rotations and packed linears.

    Raises UserError for a family that drot does not support.
    """
    if not isinstance(model, DrotModel):
        mix(model, DrotModel)
    _describe_in_config(model)


def _describe_in_config(model: Any) -> DrotConfig | None:
    """Sets or removes the `quantization_config` of a model, and returns it."""
    entry, quantizer = drot_config_of_modules(model), getattr(model, "hf_quantizer", None)
    if entry is not None:
        model.config.quantization_config = entry
        if quantizer is not None:
            quantizer.quantization_config = entry
            # transformers refuses .half() and the like for a quantized model; a rotated one may be cast
            model.is_quantized = entry.packed
            quantizer.experts = _replaced_experts(model)
    elif quantizer is not None:
        quantizer.remove_quantization_config(model)
    elif hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return entry


def _replaced_experts(model: Any) -> list[ReplacedExperts]:
    return [module for module in model.modules() if isinstance(module, ReplacedExperts)]


def keep_files(model: Any, path: str | Path) -> None:
    """Lets `model`, which was loaded from `path`, write drot.json and README.md wherever it is saved.

    Nothing is done for a model without drot.json.
    """

    def find(name: str) -> Path | None:
        found = cached_file(
            str(path),
            name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return None if found is None else Path(found)

    if (file := find(MANIFEST)) is None:
        return
    card = find(CARD)
    try:
        manifest, text = read_any_manifest(file.parent), "" if card is None else read_card(card)
    except UserError:  # the commands that need the files say so
        return
    as_drot_model(model)
    model.drot_files = manifest, text


def _times(folder: Path) -> dict[str, int]:
    """File of a checkpoint → when it was written last; {} for a folder that is not there."""
    return {name: (folder / name).stat().st_mtime_ns for name in files_in(folder)}


def _upload(
    folder: Path, repo_id: str, files: list[str], *, private: bool | None = None, **arguments: Any
) -> Any:
    """Uploads `files` of `folder`, in which others may lie, as those of a training."""
    from huggingface_hub import HfApi

    api = HfApi(token=arguments.pop("token", None))
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    revision = arguments.get("revision")
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    arguments.setdefault("commit_message", "Upload model")
    return api.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=files, **arguments)


def _language_model(model: Any) -> Any:
    """The language model of a model that reads images too, with the same modules; another model as it is."""
    if model.config.model_type not in MULTIMODAL:
        return model
    with torch.device("meta"):
        text: Any = AutoModelForCausalLM.from_config(language_config(model.config), dtype=model.dtype)
    setattr(text, text.base_model_prefix, model.get_decoder())
    text.lm_head = model.lm_head
    return text


# ---- from_pretrained -----------------------------------------------------------------------------

register_quantization_config(QUANT_METHOD)(DrotConfig)


@register_quantizer(QUANT_METHOD)
class DrotQuantizer(HfQuantizer):
    """Adds the boundary rotations and the packed linears to the empty model before weights are loaded.

    The packed weights are loaded as they are: no dense weight is allocated.
    """

    requires_calibration = True
    quantization_config: DrotConfig
    #: the tensors that the caller of `save_pretrained` gave; None saves those of the model
    state_dict_to_save: dict[str, Any] | None = None
    #: whether the model reads images too
    multimodal = False
    #: the experts of the model that are packed or hold R3
    experts: Sequence[ReplacedExperts] = ()

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any] | None, dict[str, str]]:
        return self.state_dict_to_save, {}

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> Any:
        self.multimodal = model.config.model_type in MULTIMODAL
        if not hasattr(model, "lm_head" if self.multimodal else model.base_model_prefix):
            raise UserError(
                f"a checkpoint that drot wrote must be opened with its language model head, "
                f"got {type(model).__name__}: use "
                + ("AutoModelForImageTextToText" if self.multimodal else "AutoModelForCausalLM")
            )
        text = _language_model(model)
        expect_stored(text, self.quantization_config)
        if checkpoint_files is not None:  # None if the caller gave a state dict
            headers = read_headers(checkpoint_files)
            if not self.multimodal and any("language_model." in name for name in headers):
                raise UserError(
                    f"a checkpoint of a model that reads images too cannot be opened as "
                    f"{type(model).__name__}: use AutoModelForImageTextToText, or drot.load for its language "
                    "model alone"
                )
            if self.multimodal:
                names = stored_names(headers, text.config.model_type)
                headers = {own: each for name, each in headers.items() if (own := names.own(name))}
            follow_files(text, shapes_of(headers), experts_in_files(model.config.model_type))
            check_headers(text, headers, STORED_DTYPES)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        text = _language_model(model)
        decoder = DecoderModel(text)
        check_packed(text)
        check_rotations(decoder.layer_modules, decoder.family.layers)
        # transformers makes every floating-point parameter trainable
        for _, weight in packed_weights(model):
            weight.requires_grad_(False)
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in (ROTATION_MODULE, DOWN_ROTATION):
                module.requires_grad_(False)
        # accelerate's hooks move the input of each module by itself, and fused modules share theirs
        if self.quantization_config.packed and not any(hasattr(part, "_hf_hook") for part in model.modules()):
            fuse(text)
        if compresses():
            compress_model(text)  # has no effect on a CPU, until the model moves to a GPU
        if self.multimodal:
            self.experts = _replaced_experts(model)
        else:
            as_drot_model(model)
            keep_files(model, model.name_or_path)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        if self.multimodal:
            raise UserError("drot saves no loaded model that reads images too: copy its folder")
        return True

    @property
    def is_trainable(self) -> bool:
        """Read by transformers' Trainer. Raises UserError if the model is packed.

        For False, the Trainer would advise adapters, which peft cannot add to packed linears.
        """
        if self.quantization_config.packed:
            raise UserError(NOT_TRAINABLE)
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Read by transformers' Trainer."""
        return self.is_trainable

    @property
    def is_compileable(self) -> bool:
        """Read by `generate`. A graph does not wait."""
        return not any(experts.waits for experts in self.experts)
