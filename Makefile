# Two commands do all the set-up: `make run` and `make test`.

PYTHON ?= python3
VENV ?= .venv
VENV_BIN := $(VENV)/bin
PIP := $(VENV_BIN)/python -m pip --disable-pip-version-check
OUT ?= build/units

SECONDS ?= 600
SEED ?= 1
ENGINE ?= reference

SUITE ?= closed
CASE ?=
PAIRS ?= 5
QUICK ?=
LOAD ?= closed 1
ROUNDS ?= 10
SYSTEMS ?= split treadle treadle,coalesce_ms=0

.PHONY: run test test-unit lint units bench alternate bench-cost chaos soak recovery stalled clean

run: $(VENV)/.run-ready ## start a node and stream eight chats at once
	@$(VENV_BIN)/treadle demo

test: $(VENV)/.test-ready lint ## everything: lint, types, unit, property and integration tests
	$(VENV_BIN)/pytest

test-unit: $(VENV)/.unit-ready ## what needs neither a model nor llama-cpp-python
	$(VENV_BIN)/pytest tests/unit

lint: $(VENV)/.unit-ready
	$(VENV_BIN)/ruff check .
	$(VENV_BIN)/ruff format --check .
	$(VENV_BIN)/mypy

units: ## systemd units for an installation: make units BIN=/opt/treadle/bin [OUT=dir]
	$(PYTHON) systemd/render.py --bin "$(BIN)" --out "$(OUT)"

bench: $(VENV)/.test-ready ## beside other servers: make bench SUITE=closed|staggered|open|overload|long|prefix|turns|cost [CASE=q4_1-exact] [PAIRS=5] [QUICK=1]
	$(VENV_BIN)/python benchmarks/compare.py --suite $(SUITE) --pairs $(PAIRS) $(if $(CASE),--case $(CASE)) $(if $(QUICK),--quick)

alternate: $(VENV)/.test-ready ## side by side, seconds apart: make alternate LOAD="closed 1" [CASE=q4_k_m-fast] [ROUNDS=10] [SYSTEMS="split treadle treadle,coalesce_ms=0"]
	$(VENV_BIN)/python benchmarks/alternate.py --load "$(LOAD)" --rounds $(ROUNDS) $(if $(CASE),--case $(CASE)) $(SYSTEMS)

bench-cost: $(VENV)/.test-ready ## what scheduling, the wire and the worker cost a tick
	$(VENV_BIN)/python benchmarks/scheduler_cost.py
	$(VENV_BIN)/python benchmarks/tick_roundtrip.py
	$(VENV_BIN)/python benchmarks/worker_overhead.py

chaos: $(VENV)/.test-ready ## load and faults on a real node: make chaos [SECONDS=600] [SEED=1] [ENGINE=reference|llama]
	$(VENV_BIN)/python tests/chaos/chaos.py --seconds $(SECONDS) --seed $(SEED) --engine $(ENGINE)

soak: $(VENV)/.test-ready ## memory, descriptors and logs over 100,000 requests: make soak [ENGINE=reference|llama]
	$(VENV_BIN)/python benchmarks/soak.py --engine $(ENGINE)

recovery: $(VENV)/.test-ready ## kills and freezes, timed: make recovery [ENGINE=reference|llama]
	$(VENV_BIN)/python benchmarks/recovery_times.py --engine $(ENGINE)

stalled: $(VENV)/.test-ready ## a client that stops reading for a minute: make stalled [ENGINE=reference|llama]
	$(VENV_BIN)/python benchmarks/stalled_reader.py --engine $(ENGINE)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Treadle needs Python 3.11 or newer; set PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.unit-ready: $(VENV)/.created pyproject.toml
	$(PIP) install --quiet -e '.[dev]'
	@touch $@

$(VENV)/.run-ready: $(VENV)/.created pyproject.toml
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	  { echo "a C++ compiler is needed to build llama.cpp; on Debian: apt-get install build-essential cmake" >&2; exit 1; }
	@echo "Installing. The first time, llama.cpp is compiled: about five minutes on two cores."
	$(PIP) install -e '.[node,demo]'
	@touch $@

$(VENV)/.test-ready: $(VENV)/.unit-ready
	@echo "Installing. The first time, llama.cpp is compiled: about five minutes on two cores."
	$(PIP) install --quiet -e '.[node,demo,dev]'
	@touch $@
