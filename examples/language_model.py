"""Saves the language model of a checkpoint that reads images too, which drot then prunes.

python examples/language_model.py mistralai/Ministral-3-8B-Base-2512 ministral-3-8b
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel


def language_model(whole: PreTrainedModel) -> PreTrainedModel:
    """The language model of `whole`, with the same weights, as a model of its own type."""
    config = whole.config.get_text_config()
    config.tie_word_embeddings = whole.lm_head.weight is whole.get_input_embeddings().weight
    model = AutoModelForCausalLM.from_config(config, dtype=whole.dtype)
    setattr(model, model.base_model_prefix, whole.model.language_model)
    model.lm_head = whole.lm_head
    model.generation_config = whole.generation_config
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a name on the Hugging Face hub, or a local folder")
    parser.add_argument("out", type=Path, help="the folder to write")
    options = parser.parse_args()
    whole = AutoModelForImageTextToText.from_pretrained(options.model, dtype="auto")
    language_model(whole).save_pretrained(options.out)
    AutoTokenizer.from_pretrained(options.model).save_pretrained(options.out)


if __name__ == "__main__":
    main()
