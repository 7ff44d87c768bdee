# A fresh machine needs only python3 >= 3.11 (with venv) and make.
#   make serve    tiny Qwen3.8-shaped checkpoint on the CPU, prints a working curl
#   make test     everything that runs without a GPU
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv serve test test-fast test-gpu check fmt eval-smoke clean

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PORT   ?= 8000
TINY   ?= .cache/tiny-text-fp8
ARGS   ?=
GPU_PYTHON ?= python3
GPU_REPORT ?= gpu-report.json
# make test PYTEST_ARGS="-k scheduler -x"
PYTEST_ARGS  ?=
TEST_WORKERS ?= 2
# GSM8K as train.jsonl and test.jsonl (github.com/openai/grade-school-math); not part of this project.
GSM8K_DIR ?= ../shared/data/gsm8k

help:
	@sed -n '2,3s/^# *//p' Makefile
	@echo "also: venv check fmt test-fast test-gpu eval-smoke clean"

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

$(TINY)/config.json: $(VENV)/.installed-cpu
	$(BIN)/rocm-serve make-checkpoint --layout text-fp8 --mtp bf16 --out $(TINY)
	@touch $@

serve: $(TINY)/config.json
	$(BIN)/rocm-serve serve --model $(TINY) --served-model-name tiny --device cpu --port $(PORT) $(ARGS)

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-fast: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not multirank" $(PYTEST_ARGS)

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

eval-smoke: $(VENV)/.installed-eval $(TINY)/config.json
	$(BIN)/python evals/smoke.py --model $(TINY) --data $(GSM8K_DIR)

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
