"""The model's own tokenizer in the gateway: the exact token ids of a prompt, as its engine will see them.

Loaded from a Hugging Face folder. Long prompts are tokenized by a few threads (`tokenizers` lets go of the GIL), short
ones at once: a hop to a thread costs more than they do. No prompt waits for its ids for long: without them it is text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from hashlib import blake2b
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import tokenizers

from gateway.chat_template import ChatTemplate, Unrendered
from gateway.config import ConfigError, TokenizerConfig
from gateway.errors import clipped
from gateway.openai_api import Api

_log = logging.getLogger("pdgate.tokenizer")

AT_ONCE_BYTES = 2048
"""Prompts up to this are tokenized on the event loop: 1 to 2 ms on a slow core. A hop to a thread is some 0.1 ms."""
THREADS = 2
MAX_WAITING = 32
"""Prompts that may wait for a thread; further ones go without ids."""
DEADLINE_S = 2.0
"""So long a prompt waits for a thread, and then so long for its ids; later it goes without them."""
_MAX_REASON_CHARS = 200

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MEDIA_FIELDS = ("image_data", "video_data", "audio_data", "modalities")

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # we have threads, and are forked

T = TypeVar("T")


class Untokenized(Exception):
    """The ids of this prompt cannot be known here; the text says why."""


class Tokenizer:
    """Prompts to ids. `fingerprint` names tokenizer and template: equal ones give equal ids.

    `vocabulary_tokens` is one more than the highest id, added tokens included. `generation_config` is the model's own,
    whose sampling parameters engines may apply where a chat names none; None where its file is not in the folder.
    """

    def __init__(
        self,
        model: tokenizers.Tokenizer,
        template: ChatTemplate | None,
        bos_id: int | None,
        fingerprint: str,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = model
        self._template = template
        self._bos_id = bos_id
        self._free = asyncio.Semaphore(THREADS)
        self._late: set[asyncio.Future[Any]] = set()
        """What runs for longer than DEADLINE_S: a thread cannot be stopped, and is free again only when it ends."""
        self._waiting = 0
        self._closed = False
        self.fingerprint = fingerprint
        self.generation_config = generation_config
        self.vocabulary_tokens = 1 + max(model.get_vocab(with_added_tokens=True).values(), default=-1)

    def ids(self, api: Api, body: Mapping[str, Any]) -> array[int]:
        """The ids of one prompt's body, as unsigned 32-bit words; raises Untokenized."""
        try:
            if api is Api.CHAT:
                return self._chat_ids(body)
            if any(body.get(name) is not None for name in _MEDIA_FIELDS):
                raise Untokenized("it has parts that only the engine can turn into tokens")
            return self.text_ids(body["prompt" if api is Api.COMPLETIONS else "text"])
        except Untokenized:
            raise
        except Unrendered as error:
            raise Untokenized(str(error)) from error
        except Exception as error:
            # Wide: the body is any JSON, the template is somebody's program, `tokenizers` raises plain Exception. A
            # prompt that none of them can take still has engines that may, so it must not become an error of ours.
            reason = clipped(f"{type(error).__name__}: {error}", _MAX_REASON_CHARS)
            raise Untokenized(f"it cannot be tokenized here: {reason}") from error

    def text_ids(self, text: str, *, plain: bool = True) -> array[int]:
        """The ids of a text; a `plain` one with what the tokenizer adds (such as BOS), which a rendered chat has."""
        try:
            (encoding,) = self._model.encode_batch_fast([text], add_special_tokens=plain)
        except (ValueError, TypeError, UnicodeError) as error:
            raise Untokenized(f"the tokenizer refuses it: {error}") from error
        return array("I", encoding.ids)

    def text_of(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; U+FFFD where bytes of a character are missing."""
        return str(self._model.decode(ids, skip_special_tokens=skip_special_tokens))

    def _chat_ids(self, body: Mapping[str, Any]) -> array[int]:
        if self._template is None:
            raise Untokenized("the tokenizer has no chat template")
        rendered = self._template.render(body)
        ids = self.text_ids(rendered.text, plain=False)
        if rendered.answer_prefix:
            begun = self.text_ids(rendered.answer_prefix)
            ids += begun[1:] if begun and begun[0] == self._bos_id else begun
        return ids

    async def run(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Do `work` on a prompt of this size: now, or in a thread; raises what it raises, and Untokenized.

        In a thread it may take 2 * DEADLINE_S: the wait for one, and the work.
        """
        if size_bytes <= AT_ONCE_BYTES:
            return work()
        if self._closed:
            raise Untokenized("the gateway stops")
        if len(self._late) >= THREADS:
            raise Untokenized("the tokenizer is stuck")
        if self._waiting >= MAX_WAITING:
            raise Untokenized("too many prompts wait to be tokenized")
        self._waiting += 1
        try:
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await self._free.acquire()
            except TimeoutError:
                raise Untokenized(f"no thread was free to tokenize it within {DEADLINE_S:g} s") from None
            done = self._in_thread(work)
            await asyncio.wait({done}, timeout=DEADLINE_S)
            if not done.done():
                raise Untokenized(f"it was not tokenized within {DEADLINE_S:g} s")
            return done.result()
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """No more prompts go to threads; those that are there are nobody's."""
        self._closed = True

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Start `work` in a thread that does not keep the process from ending, as those of an executor would."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        timer = loop.call_later(DEADLINE_S, self._is_late, done)
        done.add_done_callback(partial(self._has_ended, timer))
        Thread(target=_do, args=(loop, done, work), name="tokenizer", daemon=True).start()
        return done

    def _is_late(self, done: asyncio.Future[Any]) -> None:
        self._late.add(done)
        if len(self._late) == THREADS:
            _log.warning(
                "the tokenizer is stuck: all its %d threads have worked on one prompt for over %g s, which is a chat "
                "template without end or a slow machine; long prompts are hashed as text until a thread is free",
                *(THREADS, DEADLINE_S),
            )

    def _has_ended(self, timer: asyncio.TimerHandle, done: asyncio.Future[Any]) -> None:
        timer.cancel()
        done.exception()  # nobody may be there any more to take it
        self._late.discard(done)
        self._free.release()


def _do(loop: asyncio.AbstractEventLoop, done: asyncio.Future[T], work: Callable[[], T]) -> None:
    """What a thread does: `work`, and its end told to the loop."""
    tell: Callable[[], None]
    try:
        tell = partial(done.set_result, work())
    except BaseException as error:  # the caller's to handle, on the loop; a panic of the library is no Exception
        tell = partial(done.set_exception, error)
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(tell)


# ---- loading ---------------------------------------------------------------------------------------------------------


def load(config: TokenizerConfig, now: Callable[[], datetime] = datetime.now) -> Tokenizer | None:
    """The tokenizer that the flags name, None without; ConfigError names the flag, the file and what is wrong."""
    if config.path is None:
        return None
    given = Path(config.path)
    file = given / "tokenizer.json" if given.is_dir() else given
    flag = f"--tokenizer-path {given}"
    if not file.is_file():
        what = "has no tokenizer.json" if given.is_dir() else "is no file or folder here (models are not downloaded)"
        raise ConfigError(f"{flag}: {what}; give the model's Hugging Face folder")
    settings = {**_object(flag, file.parent, "special_tokens_map.json"), **_object(flag, file.parent, _CONFIG)}
    source, named = _template_source(config, file.parent, settings)
    special_tokens = _special_tokens(settings)
    template = None
    if source is not None:
        try:
            template = ChatTemplate(source, special_tokens, now)
        except ValueError as error:
            raise ConfigError(f"{named}: not a chat template: {error}") from error
    try:
        raw = file.read_bytes()
        model = tokenizers.Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{flag}: {file} is not a tokenizer: {error}") from error
    model.no_truncation()
    model.no_padding()
    _add_missing(model, settings)
    digest = blake2b(digest_size=16)
    for part in (raw, (source or "").encode(), json.dumps(settings, sort_keys=True).encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    bos_id = model.token_to_id(special_tokens["bos_token"]) if "bos_token" in special_tokens else None
    return Tokenizer(model, template, bos_id, digest.hexdigest(), _generation_config(flag, file.parent))


_CONFIG = "tokenizer_config.json"
_GENERATION_CONFIG = "generation_config.json"


def _generation_config(flag: str, folder: Path) -> dict[str, Any] | None:
    return _object(flag, folder, _GENERATION_CONFIG) if (folder / _GENERATION_CONFIG).exists() else None


def _object(flag: str, folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the folder; empty where the file is not there."""
    file = folder / name
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}: cannot read {file}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{flag}: {file} holds no JSON object")
    return value


def _text(flag: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{flag}: cannot read it: {error}") from error


def _template_source(config: TokenizerConfig, folder: Path, settings: Mapping[str, Any]) -> tuple[str | None, str]:
    """The template, and where it is from. Of several named ones the first, as SGLang takes."""
    if config.chat_template is not None:
        flag = f"--chat-template {config.chat_template}"
        return _text(flag, Path(config.chat_template)).strip("\n").replace("\\n", "\n"), flag
    flag = f"--tokenizer-path {folder}"
    file = folder / "chat_template.jinja"
    if file.exists():
        return _text(flag, file), f"{flag}: {file.name}"
    found = _object(flag, folder, "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(found, list):
        found = next((each.get("template") for each in found if isinstance(each, dict)), None)
    elif isinstance(found, dict):
        found = next(iter(found.values()), None)
    if found is not None and not isinstance(found, str):
        raise ConfigError(f"{flag}: the chat_template of {_CONFIG} is neither a text nor a list of named texts")
    return found, f"{flag}: {_CONFIG}"


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens, each a text or the object of an added token."""
    found = {}
    for name in _SPECIAL_TOKENS:
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _add_missing(model: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Add the tokens that only the configuration names, as transformers does."""
    known = {token.content for token in model.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder")
    for _, given in sorted((listed if isinstance(listed, dict) else {}).items(), key=lambda item: int(item[0])):
        if given.get("content") not in known:
            flags = {
                name: bool(given.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            model.add_tokens([tokenizers.AddedToken(given["content"], **flags)])
            known.add(given["content"])
    more = settings.get("additional_special_tokens")
    texts = [*_special_tokens(settings).values(), *(more if isinstance(more, list) else ())]
    model.add_special_tokens([text for text in texts if isinstance(text, str) and text not in known])
