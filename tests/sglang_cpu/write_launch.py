"""Writes `launch.json`, which says how servers of this environment are started. `write_launch.py DIR`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def launch(directory: Path) -> dict[str, Any]:
    """As `engines.sglang_process` reads it."""
    model = directory / "model"
    return {
        "python": str(directory / "venv" / "bin" / "python"),
        "model_dir": str(model),
        "served_model_name": "tiny",
        "environment": {
            "PYTHONPATH": str(directory / "shim"),
            "PYTHONWARNINGS": "ignore",
            "LD_LIBRARY_PATH": os.pathsep.join(
                filter(None, [str(directory / "lib"), os.environ.get("LD_LIBRARY_PATH")])
            ),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_HOST_IP": "127.0.0.1",  # Mooncake would advertise the network card
        },
        "arguments": [
            *("--model-path", str(model), "--served-model-name", "tiny"),
            *("--device", "cpu", "--dtype", "float32"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--disable-cuda-graph", "--disable-overlap-schedule"),
            *("--max-total-tokens", "8192", "--max-running-requests", "16"),
            "--sleep-on-idle",  # else each scheduler burns a core while idle
            "--enable-metrics",
            "--enable-cache-report",
        ],
        "prefill": ["--disaggregation-transfer-backend", "mooncake_tcp"],
        "decode": [
            *("--disaggregation-transfer-backend", "mooncake_tcp"),
            *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
        ],
        "plain": [],
    }


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    (directory / "launch.json").write_text(json.dumps(launch(directory), indent=2) + "\n")
