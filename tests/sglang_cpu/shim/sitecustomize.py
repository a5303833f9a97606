"""Lets SGLang 0.5.23 from PyPI serve on a CPU, by changing three things as they are imported. Put on PYTHONPATH.

- torchvision's wheel is a CUDA build, whose operators do not load beside a CPU torch; it fails at import where it
  registers what two of them return. They only have to be declared.
- The prefill's senders of KV would take indexes from pinned memory, which needs a GPU: told that they cannot, SGLang
  takes the plain way.
- HiCache's host pool would pin its memory as well, and its copies are kernels: the same copies in plain torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

_kept: list[Any] = []
"""Libraries of operators live as long as somebody holds them."""


def _declare_torchvision_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def _take_no_pinned_indexes(module: Any) -> None:
    for value in vars(module).values():
        if isinstance(value, type) and "supports_host_tensor_indices" in vars(value):
            value.supports_host_tensor_indices = False


def _pin_no_host_pool(module: Any) -> None:
    begin = module.HostKVCache.__init__

    def begin_unpinned(self: Any, *args: Any, **kwargs: Any) -> None:
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        begin(self, *args, **kwargs)

    module.HostKVCache.__init__ = begin_unpinned


def _copy_in_torch(module: Any) -> None:
    def pages(indices: Any, page_size: int) -> Any:
        return indices[::page_size] // page_size

    def layers(sources: Any, targets: Any, source_indices: Any, target_indices: Any, page_size: int) -> None:
        for source, target in zip(sources, targets, strict=True):
            target[target_indices] = source[source_indices]

    def page_to_layer(
        sources: Any, targets: Any, source_indices: Any, target_indices: Any, layer: int, page_size: int
    ) -> None:
        for source, target in zip(sources, targets, strict=True):
            taken = source[pages(source_indices, page_size), layer]
            target[target_indices] = taken.reshape(-1, *target.shape[1:])

    def layers_to_page(sources: Any, targets: Any, source_indices: Any, target_indices: Any, page_size: int) -> None:
        count = len(sources) // len(targets)
        places = pages(target_indices, page_size)
        for at, source in enumerate(sources):
            taken = source[source_indices].reshape(len(places), page_size, *source.shape[1:])
            targets[at // count][places, at % count] = taken

    module.transfer_kv_direct = layers
    module.transfer_kv_per_layer_direct_pf_lf = page_to_layer
    module.transfer_kv_all_layer_direct_lf_pf = layers_to_page


_BEFORE: Mapping[str, Callable[[], None]] = {"torchvision": _declare_torchvision_operators}
_AFTER: Mapping[str, Callable[[Any], None]] = {
    "sglang.srt.disaggregation.mooncake.conn": _take_no_pinned_indexes,
    "sglang.srt.disaggregation.common.conn": _take_no_pinned_indexes,
    "sglang.srt.disaggregation.base.conn": _take_no_pinned_indexes,
    "sglang.srt.mem_cache.pool_host.base": _pin_no_host_pool,
    "sglang.srt.mem_cache.pool_host.mha": _copy_in_torch,
    "sglang.srt.mem_cache.pool_host.mla": _copy_in_torch,
}


class _Changer(importlib.abc.MetaPathFinder):
    """Finds the modules above as everybody else would, and runs the change before or after them."""

    def __init__(self) -> None:
        self._finding: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in self._finding:
            return None
        if name in _BEFORE:
            self._finding.add(name)  # once is enough
            _BEFORE[name]()
        if name not in _AFTER:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_change(module: Any) -> None:
            run(module)
            _AFTER[name](module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Changer())
