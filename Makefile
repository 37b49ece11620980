# Two commands set everything up: `make demo` runs the main study on embedded real data, `make test` the tests.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -q --dist loadscope --no-loadscope-reorder --durations=20

# With it every command and every rank compiles the project anew as it starts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-fast fuzz check docs mutants coverage gpu slurm slurm-stop clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"kronscale needs Python >= 3.11, got {sys.version.split()[0]}: try make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/kronscale run -f jobs/sweeps/demo.yaml
	$(BIN)/kronscale report -f jobs/sweeps/demo.yaml

# All tests. Those on Slurm mostly wait: one worker more than there are CPUs.
test: setup
	$(PYTEST) -n $$(($$(nproc) + 1))

# What runs while you work: everything that starts no ranks and trains to no target.
test-fast: setup
	$(PYTEST) -n $$(nproc) -m "not ranks and not slurm and not slow and not gpu"

# 5,000 damaged files of each kind that is read: minutes.
fuzz: setup
	KRONSCALE_MUTATIONS=5000 $(PYTEST) -rP -n $$(nproc) tests/harness/test_mutated_settings.py tests/analysis/test_fuzzed_files.py

check: setup docs
	$(BIN)/pre-commit run --all-files
	@message=$$(mktemp) && git log -1 --format=%B > $$message && \
	  $(BIN)/pre-commit run --hook-stage commit-msg --commit-msg-filename $$message; status=$$?; rm -f $$message; exit $$status

# The documentation in site/; a broken link or a field without a description is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Breaks the code in SAMPLE random places, one at a time: tests must notice. Hours; goes on where it was stopped.
mutants: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt cosmic-ray
	$(BIN)/python -m jobs.experiments.mutants results/mutants.csv --sample $(or $(SAMPLE),200)

# How often intervals hold the truth and verdicts are right, on simulated studies: results/coverage.csv and .md, the same bytes each time.
coverage: setup
	$(BIN)/python -m jobs.experiments.coverage results/coverage

# On a GPU: tests of the core, then nine minutes of measurements; the same command goes on with what is missing.
# It needs a Python with torch, pytest and hypothesis: the virtual environment's, or PYTHON's where there is none.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu:
	$(GPU_PYTHON) -m pytest -q -m gpu tests/gpu
	$(GPU_PYTHON) -m harness.bench gpu

# A real Slurm of four nodes on this machine, to try things on; prints how to use it.
slurm: setup
	$(BIN)/python -m tests.slurm_cluster start

slurm-stop: setup
	$(BIN)/python -m tests.slurm_cluster stop

clean:
	rm -rf .venv build dist results/runs results/derived .*_cache
