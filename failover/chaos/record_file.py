"""Writes a record to a file and reads it back: JSON, compressed where the name ends in `.gz`."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import orjson

from failover.chaos.plain import FormError, plain, typed
from failover.chaos.record import Record

FORM = 1
"""Of the file; another one is refused."""
_COMPRESSION = 6


class RecordFileError(Exception):
    """A file that is no record; the words name the file and what is wrong with it."""


def write(record: Record, path: Path) -> None:
    """Write the record to `path`, whose folder is there; OSError where it cannot be. Equal records, equal bytes."""
    text = orjson.dumps({"form": FORM, **plain(record)})
    path.write_bytes(gzip.compress(text, _COMPRESSION, mtime=0) if path.suffix == ".gz" else text + b"\n")


def read(path: Path) -> Record:
    """The record in `path`; RecordFileError where there is none."""
    try:
        content = path.read_bytes()
        value = orjson.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    except OSError as error:
        raise RecordFileError(f"{path}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise RecordFileError(f"{path}: it is cut off, or not compressed: {error}") from error
    except orjson.JSONDecodeError as error:
        raise RecordFileError(f"{path}: it is cut off, or no JSON: {error}") from error
    if not isinstance(value, dict) or "form" not in value:
        raise RecordFileError(f"{path}: no record of `pdgate chaos run --out`")
    if (form := value.pop("form")) != FORM:
        raise RecordFileError(f"{path}: a record of form {form!r}; this program reads form {FORM}")
    try:
        return typed(Record, value)
    except FormError as error:
        raise RecordFileError(f"{path}: {error}") from error
