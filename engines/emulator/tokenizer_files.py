"""The emulated tokenizer and chat template in Hugging Face format, made from `tokens.py`.

`python -m engines.emulator.tokenizer_files` writes them to `engines/emulator/tokenizer/`, where they are kept; the
emulator itself never reads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engines.emulator.draw import MODEL_DEFAULTS
from engines.emulator.tokens import SPECIAL_TOKENS, WORDS
from engines.token_rule import EOS_TOKEN

FOLDER = Path(__file__).parent / "tokenizer"

_END_OF_TEXT, _START, _END = SPECIAL_TOKENS
_TEMPLATE = f"""\
{{%- if tools %}}
    {{{{- '{_START}system\\n' }}}}{{{{ tools | tojson(separators=(',', ':')) }}}}{{{{ '{_END}\\n' }}}}
{{%- endif %}}
{{%- for message in messages %}}
    {{{{- '{_START}' + message['role'] + '\\n' }}}}
    {{%- if message['content'] is string %}}
        {{{{- message['content'] }}}}
    {{%- else %}}
        {{%- for part in message['content'] %}}
            {{%- if part['type'] == 'text' %}}
                {{{{- part['text'] }}}}
            {{%- endif %}}
        {{%- endfor %}}
    {{%- endif %}}
    {{{{- '{_END}\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
    {{{{- '{_START}assistant\\n' }}}}
{{%- endif %}}
"""


def tokenizer_files() -> dict[str, str]:
    """The text of every file, by its name."""
    return {
        "tokenizer.json": _json(_tokenizer()),
        "tokenizer_config.json": _json(_config()),
        "generation_config.json": _json({"do_sample": True, "eos_token_id": EOS_TOKEN, **MODEL_DEFAULTS}),
        "chat_template.jinja": _TEMPLATE,
    }


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"


def _byte_characters() -> list[str]:
    """The character that ByteLevel writes for each byte: itself where it is printable, else one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _tokenizer() -> dict[str, Any]:
    characters = _byte_characters()
    words = ["".join(characters[byte] for byte in word.encode()) for word in WORDS]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, **_added(text)} for token, text in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: token for token, text in enumerate((*SPECIAL_TOKENS, *characters, *words))},
            "merges": [],
        },
    }


def _added(text: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": text, **flags}


def _config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(token): _added(text) for token, text in enumerate(SPECIAL_TOKENS)},
        "bos_token": None,
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN],
        "pad_token": _END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }


def main() -> None:
    """Write the files, and say which."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in tokenizer_files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
