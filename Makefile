# One word each: `make demo`, `make check`, `make test`, `make test-long`. Each makes what it needs.
PYTHON ?= $(shell command -v python3.12 >/dev/null 2>&1 && python3.12 --version >/dev/null 2>&1 && echo python3.12 || \
            (command -v python3.11 >/dev/null 2>&1 && python3.11 --version >/dev/null 2>&1 && echo python3.11 || echo python3))
VENV ?= .venv
BIN := $(VENV)/bin
SGLANG_DIR ?= $(shell echo $${PDGATE_SGLANG_DIR:-$${XDG_CACHE_HOME:-$$HOME/.cache}/pdgate/sglang-0.5.23})
SEEDS ?= 1
BESIDE := $(MAKE) --no-print-directory -j2 --output-sync=line # one computes while the other waits
SGLANG := PDGATE_SGLANG_DIR="$(SGLANG_DIR)"

.PHONY: help demo install check lint types unit contract browser chaos chaos-quick scenarios test sglang test-sglang smoke-sglang conformance test-long flaky clean

help:
	@echo 'make demo       install, then a fleet of emulated servers, a gateway, and kills; every answer checked'
	@echo 'make check      lint, types, unit and property tests'
	@echo 'make test       check + contract + browser + scenarios on real processes + eight chaos scenarios'
	@echo 'make chaos      every scenario of examples/chaos, its short form; SEEDS=5 for more'
	@echo 'make flaky PATHS=tests/...  each file in four copies at once, three times: what fails on a busy machine'
	@echo 'make test-long  every criterion at its full size'
	@echo 'make sglang     an environment that runs a real SGLang on a CPU'
	@echo 'make test-sglang  pdgate in front of it; make smoke-sglang: eight cases of that'
	@echo 'make conformance  the emulator held to it, case by case'
	@echo 'make clean      remove what was installed. PYTHON=, VENV=, SGLANG_DIR= say where things are'

demo: $(VENV)/installed
	$(BIN)/pdgate demo

install: $(VENV)/installed-dev

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v in ((3, 11), (3, 12)) else "pdgate needs Python 3.11 or 3.12 and found %d.%d: set PYTHON=/path/to/python3.11" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=24"

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/installed

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/installed-dev
	$(BIN)/mypy

unit: $(VENV)/installed-dev
	$(BIN)/pytest tests/test_architecture.py tests/unit tests/property -m 'not long' -n 2

contract: $(VENV)/installed-dev
	$(BIN)/pytest tests/contract -m 'not long' -n 3 --dist loadfile

scenarios: $(VENV)/installed-dev
	$(BIN)/pytest tests/scenarios -m 'not long and not alone' -n 3 --dist loadfile --no-loadscope-reorder
	$(BIN)/pytest tests/scenarios -m 'alone and not long'

check: $(VENV)/installed-dev
	@$(BESIDE) lint types unit

browser: $(VENV)/installed-dev
	$(BIN)/pytest tests/browser -m 'not long'

chaos: $(VENV)/installed-dev
	$(BIN)/pdgate chaos run examples/chaos --seeds $(SEEDS)

chaos-quick: $(VENV)/installed-dev
	$(BIN)/pdgate chaos run examples/chaos --quick

test: check
	@$(BESIDE) contract browser
	@$(MAKE) --no-print-directory scenarios
	@$(MAKE) --no-print-directory chaos-quick

sglang:
	PYTHON=$(PYTHON) tests/sglang_cpu/install.sh "$(SGLANG_DIR)"

test-sglang: $(VENV)/installed-dev sglang
	$(SGLANG) $(BIN)/pytest tests/sglang --timeout 600
	$(SGLANG) $(BIN)/python -m tests.conformance --fault-free

smoke-sglang: $(VENV)/installed-dev sglang
	$(SGLANG) $(BIN)/pytest tests/sglang -m smoke --timeout 600

conformance: $(VENV)/installed-dev sglang
	$(SGLANG) $(BIN)/python -m tests.conformance

flaky: $(VENV)/installed-dev
	$(BIN)/python -m tests.flaky $(PATHS)

test-long: $(VENV)/installed-dev
	$(BIN)/pytest tests/unit tests/property -m 'not long' --hypothesis-profile many -n 2 --timeout 3600
	$(BIN)/pytest tests -m long --timeout 3600
	$(BIN)/pdgate chaos run examples/chaos --long --seeds 5 --resume --out chaos-records

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
