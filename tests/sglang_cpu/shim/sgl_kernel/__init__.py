"""Stands in for SGLang's kernels, of which PyPI has CUDA builds only.

On a CPU several modules import names ending in `_cpu` without asking whether they exist. A server with plain flags
calls one of them: the rest only have to be there, and say so when called. `torch.ops.sgl_kernel` stays absent, which
makes SGLang take its paths in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start_offset: Any, end_offset: Any, out_cache_loc: Any, pool_len: int
) -> None:
    """Write each request's new cache locations, which lie one after the other, into its row of the table."""
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        new = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = new.to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not there: this is a stand-in for plain CPU serving")

    return absent
