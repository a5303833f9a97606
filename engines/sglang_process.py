"""Real SGLang servers as child processes: how they are started is read from an environment's `launch.json`. A shell.

`make sglang` builds an environment that runs on a CPU. To start servers of another one (a GPU machine's, say), write
its `launch.json` by hand: {"python": path of the interpreter that has sglang, "model_dir": folder of weights and
tokenizer, "served_model_name": ..., "environment": {variables}, "arguments": [flags of every server, --model-path among
them], "prefill": [...], "decode": [...], "plain": [flags of that role]}.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.server_process import ServerProcess, free_ports
from engines.types import Role

VERSION = "0.5.23"
"""Of SGLang: the one that `make sglang` installs."""


class NoEnvironment(RuntimeError):
    """There is no environment to start SGLang from, or it cannot be read; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How servers of one environment are started. `model_dir`: of the tokenizer and weights that all of them load."""

    directory: Path
    python: str
    model_dir: Path
    served_model_name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    by_role: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)


def default_directory() -> Path:
    """`$PDGATE_SGLANG_DIR`, else where `make sglang` puts its environment."""
    named = os.environ.get("PDGATE_SGLANG_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else cache / "pdgate" / f"sglang-{VERSION}"


def load(directory: Path | None = None) -> Launch:
    """Read an environment; raises NoEnvironment."""
    directory = default_directory() if directory is None else directory
    file = directory / "launch.json"
    try:
        told = json.loads(file.read_text())
        return _launch(directory, told)
    except FileNotFoundError:
        raise NoEnvironment(
            f"there is no SGLang environment in {directory}: run `make sglang` in a checkout of pdgate, or name another"
            " with --sglang-dir or PDGATE_SGLANG_DIR"
        ) from None
    except (OSError, ValueError) as error:
        raise NoEnvironment(f"{file} cannot be used: {error}") from error


def _launch(directory: Path, told: Any) -> Launch:
    if not isinstance(told, dict):
        raise ValueError("it holds no JSON object")
    python = _text(told, "python", "the full path of the interpreter that has sglang")
    if not os.access(python, os.X_OK):
        raise ValueError(f"python {python!r} is not there or cannot be run: name the full path of one that has sglang")
    variables = told.get("environment", {})
    if not isinstance(variables, dict):
        raise ValueError('"environment" must be an object of variables')
    return Launch(
        directory=directory,
        python=python,
        model_dir=Path(_text(told, "model_dir", "the folder of weights and tokenizer")),
        served_model_name=_text(told, "served_model_name", "what the servers call their model"),
        environment={str(name): str(value) for name, value in variables.items()},
        arguments=_words(told, "arguments"),
        by_role={role: _words(told, role.value) for role in Role},
    )


def _text(told: Mapping[str, Any], name: str, what: str) -> str:
    if not isinstance(value := told.get(name), str) or not value:
        raise ValueError(f'"{name}" must be a text: {what}')
    return value


def _words(told: Mapping[str, Any], name: str) -> tuple[str, ...]:
    if not isinstance(value := told.get(name, []), list):
        raise ValueError(f'"{name}" must be a list of flags')
    return tuple(map(str, value))


class SglangServer(ServerProcess):
    """One real SGLang server in a child process. Ports default to free ones; `arguments`: more of its flags.

    What it says goes to `log`, by default a file in the environment's `logs` named by role and port.
    """

    ready_timeout_s = 400.0
    stop_signal = signal.SIGKILL
    """At SIGTERM it waits for its requests, and then long for its schedulers."""

    def __init__(
        self,
        role: Role,
        launch: Launch,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
        bootstrap_port: int | None = None,
        host: str = "127.0.0.1",
        log: Path | None = None,
    ) -> None:
        free = free_ports(2, host)
        port, bootstrap_port = port or free[0], bootstrap_port or free[1]
        own = ["--host", host, "--port", str(port)]
        if role is not Role.PLAIN:
            own += ["--disaggregation-mode", role.value, "--disaggregation-bootstrap-port", str(bootstrap_port)]
        self.arguments = (*launch.arguments, *launch.by_role.get(role, ()), *arguments, *own)
        self._python = launch.python
        if log is None:
            log = launch.directory / "logs" / f"{role.value}-{port}.log"
            try:
                log.parent.mkdir(exist_ok=True)
            except OSError as error:
                raise NoEnvironment(f"the servers' output cannot be written: {error}") from error
        super().__init__(
            role,
            host=host,
            port=port,
            bootstrap_port=bootstrap_port,
            environment={**launch.environment, **(environment or {})},
            log=log,
            leads_group=True,
        )

    def command(self) -> Sequence[str]:
        return (self._python, "-m", "sglang.launch_server", *self.arguments)
