# A fresh machine needs only python3 >= 3.11 (with venv) and make.
#   make serve    tiny trained Qwen3.8-shaped checkpoint on the CPU, prints a working curl
#   make test     everything that runs without a GPU
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv serve test test-fast test-two-hosts two-hosts-tools test-gpu check fmt bench-host gate eval-smoke eval-reference planted compile-gfx emulate gfx-tools bench-norms bench-gpu clean

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PORT   ?= 8000
TINY   ?= evals/tiny/checkpoint
ARGS   ?=
GPU_PYTHON ?= python3
BENCH_ARGS ?=
PART ?= decode
GPU_REPORT ?= gpu-report.json
# make test PYTEST_ARGS="-k scheduler -x"
PYTEST_ARGS  ?=
TEST_WORKERS ?= 2
# GSM8K as train.jsonl and test.jsonl (github.com/openai/grade-school-math); not part of this project.
GSM8K_DIR ?= ../shared/data/gsm8k
# make gate GATE_LIMIT=1319
GATE_LIMIT ?= 200
GATE_SERVE_ARGS ?= --tp 2 --pp 2 --device cpu --dtype float32
GATE_ARGS  ?=
# make emulate GFX_ARGS="--only moe_experts --seed 7"
GFX_ARGS ?=

help:
	@sed -n '2,3s/^# *//p' Makefile
	@echo "also: venv check fmt test-fast test-two-hosts test-gpu bench-host gate eval-smoke eval-reference planted compile-gfx emulate bench-norms bench-gpu clean"

venv: $(VENV)/.installed-dev

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than 3.11; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "make: $(PYTHON) has no working venv module (Debian and Ubuntu: apt-get install python3-venv)"; rm -rf $(VENV); exit 2; }

# The extra `cpu` first and alone: it pins torch before any other package could ask for a different build.
$(VENV)/.installed-cpu: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-cpu
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

$(VENV)/.installed-eval: $(VENV)/.installed-cpu
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,eval]'
	@touch $@

serve: $(VENV)/.installed-cpu
	$(BIN)/rocm-serve serve --model $(TINY) --served-model-name tiny --device cpu --port $(PORT) $(ARGS)

# Tests start hundreds of processes: each compiles all that it imports where the environment forbids compiled files.
test test-fast test-two-hosts: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-fast: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not multirank" $(PYTEST_ARGS)

# Two network namespaces as two hosts; needs root. `make test` runs these too, and skips them where that is missing.
test-two-hosts: two-hosts-tools $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --allowed-skips=tests/allowed_skips.txt tests/two_hosts $(PYTEST_ARGS)

two-hosts-tools:
	bash tests/two_hosts/install.sh

# On a machine with GPUs, by the Python that holds their torch: the image's, not that of $(VENV).
test-gpu:
	$(GPU_PYTHON) -m tests.gpu_report --out $(GPU_REPORT)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/check_tree.py

fmt: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Steps and streams with a model that costs nothing, on the cores of this machine; best when nothing else runs.
bench-host: $(VENV)/.installed-dev
	$(BIN)/python -m evals.bench_host $(BENCH_ARGS)

# The trained tiny checkpoint on four processes here, asked by lm-eval, judged against HF's answers to the same questions.
gate: $(VENV)/.installed-eval
	OMP_NUM_THREADS=1 $(BIN)/python evals/gate.py --model evals/tiny/checkpoint --reference evals/references/tiny-gsm8k-synth.jsonl --serve-args "$(GATE_SERVE_ARGS)" --limit $(GATE_LIMIT) --out .cache/gate $(GATE_ARGS)

# Real bugs of other engines, planted one at a time: does parity see each, and name it?
planted: $(VENV)/.installed-dev
	$(BIN)/python -m evals.planted ledger
	$(BIN)/python -m evals.planted parity

# Every GPU kernel for gfx942 and gfx950: compiled and checked; executed in an emulator. Needs clang 22, not a GPU.
compile-gfx: gfx-tools $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m evals.gfx compile $(GFX_ARGS)

emulate: gfx-tools $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m evals.gfx emulate $(GFX_ARGS)
	$(BIN)/python -m evals.gfx table

# On a GPU machine: the HIP norms beside a copy, by the Python that holds that machine's torch.
bench-norms:
	$(GPU_PYTHON) -m evals.bench_norms

bench-gpu:
	$(GPU_PYTHON) -m evals.bench_gpu $(PART) $(BENCH_ARGS)

gfx-tools:
	bash evals/gfx/install.sh

eval-smoke: $(VENV)/.installed-eval
	$(BIN)/python evals/smoke.py --model $(TINY) --data $(GSM8K_DIR)

# The reference launch on the loopback and lm_eval with 256 requests in flight; minutes.
eval-reference: $(VENV)/.installed-eval
	OMP_NUM_THREADS=1 $(BIN)/python evals/reference.py --data $(GSM8K_DIR)

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
