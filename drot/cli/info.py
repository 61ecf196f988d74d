"""The command `drot info`, and the table of the machine."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drot.cli.output import print_facts, print_json, print_line, print_manifest
from drot.core.checks import counted
from drot.core.errors import UserError


def info(
    folder: Path | None = None,
    verify: bool = False,
    accept: bool = False,
    as_json: bool = False,
) -> None:
    """Show the versions, backends and GPUs of this machine; or, with MODEL, how that model was made.

    Example: drot info llama-2of4

    Arguments:
        folder MODEL: A checkpoint that drot wrote. Of another folder, or of a name on the hub: whether drot
            can prune the model, and which of its modules drot cannot place.
    Output:
        verify: Compare the files of MODEL with their SHA-256, which drot recorded, and name each file that
            differs. MODEL may also be the .partial folder of an unfinished run.
        accept: Record the files of MODEL as they are now. For a checkpoint that you have changed on purpose.
        as_json:
    """
    if verify and accept:
        raise UserError("give `verify`, or `accept` to record the files as they are now, and not both")
    if folder is None and (verify or accept):
        raise UserError(f"{'`verify`' if verify else '`accept`'} needs MODEL: name a folder that drot wrote")
    if folder is None:
        from drot.machine.environment import collect

        data = collect()
        if as_json:
            print_json(data)
        else:
            print_facts(_facts(data))
        return
    if not (verify or accept) and _is_other_model(folder):
        from drot.checkpoint.manifest import MANIFEST
        from drot.checkpoint.source import model_folder

        if os.path.exists(folder) or not (model_folder(str(folder)) / MANIFEST).exists():
            _show_model(str(folder), as_json)
            return
        folder = model_folder(str(folder))  # drot wrote this model of the hub
    from drot.checkpoint.manifest import accept_files, read_any_manifest

    if accept:
        files = accept_files(folder).files
        if as_json:
            print_json({"accepted": list(files)})
        else:
            count = counted(len(files), "file")
            print_line(f"drot recorded {count} in {folder}, and drot.json, as they are now")
    elif verify:
        _verify(folder, as_json)
    else:
        manifest = read_any_manifest(folder)
        if as_json:
            print_json(manifest.to_dict())
        else:
            print_manifest(manifest)


def _is_other_model(folder: Path) -> bool:
    """Whether `folder` is a model that drot has not written: a folder, or a name on the hub."""
    from drot.checkpoint.manifest import MANIFEST
    from drot.core.hub import HUB_NAME

    if not os.path.exists(folder):
        name = folder.parent if folder.suffix == ".gguf" else folder
        return len(name.parts) == 2 and HUB_NAME.fullmatch(str(name)) is not None
    if (folder / MANIFEST).exists():
        return False
    from drot.checkpoint.integrity import CONFIG_FILE
    from drot.checkpoint.source import ADAPTER, GGUF  # it imports torch

    if folder.suffix == GGUF or any((folder / name).exists() for name in (CONFIG_FILE, ADAPTER)):
        return True
    return any(folder.glob(f"*{GGUF}"))  # the message names the file


def _show_model(name: str, as_json: bool) -> None:
    """Prints whether drot can prune a model and, of an unknown family, what it cannot place."""
    from drot.checkpoint.describe import describe_model

    found = describe_model(name)
    if as_json:
        print_json(found)
        return
    shown = {"model type": found["model_type"]}
    if method := found.get("quantised"):
        reads = "makes its weights dense while it reads them" if found["readable"] else "prunes the original"
        shown["quantised"] = f"{method}: drot {reads}"
    if text := found.get("text_model"):
        shown["language model"] = f"of type {text}; the rest is kept as it is" if found["supported"] else text
    if found["supported"]:
        shown["supported"] = f"yes, like {found['models']}"
        shown["rotations"] = ", ".join(found["rotations"]).upper()
        if fused := found["fused"]:
            shown["fused modules"] = "; ".join(f"{path}: {', '.join(of)}" for path, of in fused.items())
    else:
        shown["supported"] = "no; docs/architectures.md says how a family is added"
        if (comparison := found["comparison"]) is None:
            shown["modules"] = "transformers has no causal language model of this type"
        else:
            shown["nearest family"] = comparison["nearest"]
            shown["decoder layers"] = comparison["layers"] or "none found"
            shown["cannot place"] = ", ".join(comparison["unplaced"]) or "nothing: compare the forward passes"
            shown["lacks"] = ", ".join(comparison["lacking"]) or "nothing"
    print_facts(shown.items())


def _verify(folder: Path, as_json: bool) -> None:
    """Prints a line for each file that is not as drot wrote it. Raises UserError if a file is damaged."""
    from drot.checkpoint.integrity import EXTRA
    from drot.checkpoint.resume import IDENTITY
    from drot.checkpoint.verify import verify_folder

    found = verify_folder(folder)
    if as_json:
        print_json({"files": found.files, "damaged": found.damaged, "unknown": found.unknown})
    else:
        for name, problem in sorted(found.damaged.items()):
            print_line(f"{name} {problem}")
        listed = "parts.json" if found.unfinished else "drot.json"
        for name in found.unknown:
            print_line(f"{name} is not listed in {listed}, and no model is loaded from it")
    if found.damaged:
        extra = [name for name, problem in found.damaged.items() if problem == EXTRA]
        changed = "copy them again, or record a change of your own with --accept"
        if found.unfinished:
            changed = "the run goes on with --resume, and computes damaged parts again"
        if IDENTITY in found.damaged:
            changed = f"no run goes on without {IDENTITY}: copy it back, or remove the folder"
        advice = [changed] * (len(extra) < len(found.damaged))
        advice += ["remove the extra files, which drot did not write"] * bool(extra)
        raise UserError(
            f"the record fits all files in {folder} but {len(found.damaged)} of {len(found.files)}: "
            + ", and ".join(advice)
        )
    if not as_json:
        print_line(f"The record fits {counted(len(found.files), 'file')} in {folder}")


def _facts(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What `collect` found, in words: each version, and each fact about the machine."""
    for name in ("drot", "torch", "transformers", "tokenizers", "safetensors", "numpy", "python"):
        yield name, data[name]
    yield "built with torch", data["built_with_torch"]
    cuda, sparse = data["cuda"], data["cusparselt"]
    if cuda["compiled"]:
        yield "CUDA kernels", f"built with CUDA {cuda['compiled']} for {', '.join(cuda['architectures'])}"
        of_torch = f"version {sparse['version']}" if sparse["found"] else "none that starts"
        yield "cuSPARSELt", f"torch has {of_torch}, drot was built with {sparse['compiled'] or 'none'}"
    else:
        yield "CUDA kernels", f"none, because {data['no_cuda_reason']}"
    gpus = [
        f"{gpu['name']} (compute capability {gpu['capability']}, {gpu['memory_gib']} GiB)"
        for gpu in data["gpus"]
    ]
    yield "GPUs", "; ".join(gpus) or "none that torch finds"
    cpu = data["cpu"]
    threads = counted(cpu["threads"], "thread")
    yield "CPU", f"{cpu['machine']}, torch uses {cpu['capability']}, drot {cpu['kernels']}, {threads}"
    yield "tuning cache", data["tuning_cache"] or "none"
