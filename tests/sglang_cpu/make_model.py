"""Makes a tiny model with random weights, always the same ones, and the emulator's tokenizer. `make_model.py DIR`.

Two layers of a Qwen2, enough to be served like any other model; what it says is noise. Its tokenizer is the emulator's,
so that both count and split prompts alike. SGLang normalizes the text of a Qwen2 model to NFC whatever its file says;
here the file says so too, for those who read it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

TOKENIZER = Path(__file__).parents[2] / "engines" / "emulator" / "tokenizer"
CONTEXT_TOKENS = 4096


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TOKENIZER / name, directory / name)
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "NFC"}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer["model"]["vocab"]),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=special["<|im_end|>"],
        pad_token_id=special["<|endoftext|>"],
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
