"""The emulated tokenizer in Hugging Face format: what is kept is what `tokens.py` gives."""

from __future__ import annotations

from tokenizers import Tokenizer

from engines.emulator.tokenizer_files import FOLDER, tokenizer_files
from engines.emulator.tokens import SPECIAL_TOKENS, WORDS
from engines.token_rule import FIRST_WORD_TOKEN, VOCABULARY_TOKENS


def test_the_files_that_are_kept_are_what_is_generated() -> None:
    kept = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.iterdir()}
    assert kept == tokenizer_files(), "run python -m engines.emulator.tokenizer_files"


def test_the_vocabulary_is_the_models() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCABULARY_TOKENS
    assert [tokenizer.token_to_id(text) for text in SPECIAL_TOKENS] == [0, 1, 2]
    assert tokenizer.decode([FIRST_WORD_TOKEN + 7]) == WORDS[7]
