"""Trains a model like the embedded model of drot's demo: a LLaMA of 7 M parameters, on your own texts.

    python examples/train_tiny_llama.py --out my-tiny-llama --minutes 60 TEXT [TEXT ...]

A TEXT is a file, or a folder of which all .py, .md, .rst and .txt files are read. Without a TEXT, the model
learns the standard library of this Python, except for the modules that drot keeps for evaluation. Training
the embedded model took an hour on three CPU cores.

--family trains a small model of another family with the same sizes, as --family granite or --family phi3;
--hidden and --layers make it smaller.
"""

import argparse
import math
import random
import re
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY, WINDOW, BATCH, LEARNING_RATE, WARM_UP = 4096, 512, 8, 2e-3, 100
#: what a family has beside LLaMA's sizes; Granite's are those of Granite 3.3 2B, for a narrow model
SETTINGS = {
    "granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 1 / 32,
        "residual_multiplier": 0.22,
        "logits_scaling": 2.0,
    }
}
NOTICE = Path(__file__).parent.parent / "drot" / "reporting" / "assets" / "NOTICE"
SUFFIXES = (".py", ".md", ".rst", ".txt")


def read(paths: list[Path]) -> list[str]:
    """The texts of the files, and of the files in the folders."""
    files = [
        file
        for path in paths
        for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
        if file.is_file() and (file == path or file.suffix in SUFFIXES)
    ]
    return [file.read_text(encoding="utf-8", errors="ignore") for file in files]


def standard_library() -> list[Path]:
    """The modules of the standard library without tests, installed packages and drot's held-out modules."""
    root = Path(sysconfig.get_path("stdlib"))
    held_out = re.search(r"not trained on, joined:\n(.*?)\.\n\n", NOTICE.read_text(), re.S)
    assert held_out is not None
    names = {name.strip() for name in held_out[1].split(",")}

    def wanted(file: Path) -> bool:
        parts = file.relative_to(root).with_suffix("").parts
        return not {"site-packages", "test", "tests", "idlelib"} & set(parts) and ".".join(parts) not in names

    return [file for file in sorted(root.rglob("*.py")) if wanted(file)]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with VOCABULARY tokens."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=2048
    )


def untrained(family: str, hidden: int, layers: int) -> PreTrainedModel:
    """A model of a family, with heads of 32 channels."""
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        tie_word_embeddings=True,
        **SETTINGS.get(family, {}),
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def train(model: PreTrainedModel, ids: torch.Tensor, seconds: float) -> PreTrainedModel:
    """The model, trained for `seconds` on random windows of the token ids [n]."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    started, step = time.monotonic(), 0
    while (share := (time.monotonic() - started) / seconds) < 1:
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / WARM_UP) * decay
        starts = [random.randrange(len(ids) - WINDOW) for _ in range(BATCH)]
        batch = torch.stack([ids[start : start + WINDOW] for start in starts])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {share:.0%} of the time", flush=True)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="*", type=Path, help="files or folders; default: the standard library")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--family", default="llama", help="model_type of transformers; default: llama")
    parser.add_argument("--hidden", type=int, default=256, help="channels, a multiple of 64; default: 256")
    parser.add_argument("--layers", type=int, default=8, help="decoder layers; default: 8")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    texts = read(options.texts or standard_library())
    random.shuffle(texts)
    tokenizer = train_tokenizer(texts)
    ids = torch.tensor(tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False).input_ids)
    if len(ids) <= WINDOW:
        parser.error(f"the texts must have more than {WINDOW} tokens, got {len(ids)}: name more texts")
    print(f"{len(ids)} tokens of {len(texts)} texts", flush=True)
    model = train(untrained(options.family, options.hidden, options.layers), ids, 60 * options.minutes)
    model.to(torch.bfloat16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
