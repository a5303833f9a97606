"""CPU time of knowing a prompt by its ids, against knowing it as text. `python -m benchmarks.tokenizing`.

A chat of about 12 K tokens, in two tokenizers: the emulated one (a token a byte) and a BPE with merges, trained here on
this repository. Figures are medians over rounds of process time. Then: what a hop to a thread costs, and how long the
event loop stands still while a megabyte is tokenized.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from engines.emulator.tokenizer_files import FOLDER
from gateway import tokenizer
from gateway.candidates import BLOCK_BYTES
from gateway.config import TokenizerConfig
from gateway.openai_api import Api, canonical_chat
from gateway.tokenizer import AT_ONCE_BYTES, Tokenizer
from routing.prefix import Namespace, id_blocks, root_hash, text_blocks

ROUNDS = 5
TOKENS = 12_000
VOCABULARY = 32_000
ROOT = root_hash(Namespace("tenant", "model"))
SOURCES = sorted(Path(__file__).parents[1].glob("*/*.py"))
TEXT = "\n".join(file.read_text() for file in SOURCES)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="pdgate-tokenizing-") as folder:
        loaded = {"a token a byte": _load(FOLDER), "BPE with merges": _load(_trained(Path(folder)))}
    print("knowing a chat by its ids (CPU ms, median of 5)")
    print(f"{'tokenizer':>16} {'tokens':>7} {'KB':>5} {'ids':>8} {'text':>8} {'ratio':>6}")
    for name, own in loaded.items():
        _compare(name, own)
    own = loaded["BPE with merges"]
    print(f"\non the loop or in a thread (wall ms; now up to {AT_ONCE_BYTES} bytes on the loop)")
    for size_bytes in (512, 1024, 2048, 4096, 8192, 16_384):
        body = _chat(TEXT[:size_bytes])
        print(f"{size_bytes:>8} bytes {_median_ms(lambda body=body: own.ids(Api.CHAT, body), time.perf_counter):>8.3f}")  # type: ignore[misc]
    hop_ms, stall_ms, whole_ms = asyncio.run(_threads(own))
    print(f"a hop to a thread {hop_ms:.3f} ms; longest stall {stall_ms:.1f} ms in {whole_ms:.0f} ms for 1 MB")
    for own in loaded.values():
        own.close()


def _compare(name: str, own: Tokenizer) -> None:
    size_bytes = len(TEXT[: TOKENS * 6].encode())
    size_bytes = size_bytes * TOKENS // len(own.text_ids(TEXT[:size_bytes]))
    body = _chat(TEXT[:size_bytes])

    def by_ids() -> tuple[bytes, ...]:
        return id_blocks(ROOT, own.ids(Api.CHAT, body), 64)

    def by_text() -> tuple[bytes, ...]:
        return text_blocks(ROOT, canonical_chat(body), BLOCK_BYTES)

    ids_ms, text_ms = _median_ms(by_ids), _median_ms(by_text)
    tokens = len(own.ids(Api.CHAT, body))
    ratio = ids_ms / text_ms
    print(f"{name:>16} {tokens:>7} {size_bytes / 1000:>5.0f} {ids_ms:>8.3f} {text_ms:>8.3f} {ratio:>6.1f}")


def _chat(text: str) -> dict[str, Any]:
    """A chat of 20 turns over `text`."""
    step = max(1, len(text) // 20)
    texts = [text[start : start + step] for start in range(0, len(text), step)]
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": each} for n, each in enumerate(texts)]}


def _median_ms(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    spent = []
    for _ in range(ROUNDS):
        began = clock()
        work()
        spent.append(clock() - began)
    return statistics.median(spent) * 1000


async def _threads(own: Tokenizer) -> tuple[float, float, float]:
    """Milliseconds: a hop to a thread and back, the longest stall of the loop under 1 MB, and how long that took."""
    hops = []
    for _ in range(50):
        began = time.perf_counter()
        await own.run(AT_ONCE_BYTES + 1, lambda: None)
        hops.append(time.perf_counter() - began)
    body = _chat((TEXT * 4)[:1_000_000])
    began = last = time.perf_counter()
    work = asyncio.ensure_future(own.run(1_000_000, lambda: id_blocks(ROOT, own.ids(Api.CHAT, body), 64)))
    longest = 0.0
    while not work.done():
        await asyncio.sleep(0.0005)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return statistics.median(hops) * 1000, longest * 1000, (last - began) * 1000


def _load(folder: Path) -> Tokenizer:
    loaded = tokenizer.load(TokenizerConfig(str(folder)))
    assert loaded is not None
    return loaded


def _trained(folder: Path) -> Path:
    """A byte-level BPE of this repository's own sources, with the emulated chat template."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    model.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    model.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text((FOLDER / "chat_template.jinja").read_text())
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps({"eos_token": "<|im_end|>"}))
    return folder


if __name__ == "__main__":
    main()
