# `make demo` and `make test` set themselves up: a virtual environment in .venv, filled by pip.
PYTHON ?= python3
# What the tests are run with: of pyproject.toml, and a constraint or version for pip.
EXTRAS ?= test,lint
VERSIONS ?=
VENV := .venv
BIN := $(VENV)/bin
# Of each QR on CPU: where the cores are busy, more threads spin for 15 times as long.
ONE_THREAD := OPENBLAS_NUM_THREADS=1

.PHONY: help demo demo-local test quick elsewhere check docs format clean

help:
	@echo "make demo    train a small language model several ways; table, picture and JSON in out/"
	@echo "make demo-local  the same for local SGD and DiLoCo"
	@echo "make test    run the test suite"
	@echo "make quick   the part of it for every change: the battery, NumPy and torch beside it"
	@echo "make elsewhere   the same with the arithmetic of an older processor"
	@echo "make check   lint, formatting, types"
	@echo "make docs    build the documentation as a site in out/docs/"
	@echo "make format  rewrite the sources in the house format, and the programs in the documents"
	@echo "make clean   remove .venv, caches and out/"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxcomp needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# One stamp for each set of extras, renewed when pyproject.toml changes.
$(VENV)/.examples: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[examples]"
	@touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]" $(if $(VERSIONS),"$(VERSIONS)")
	@touch $@

$(VENV)/.docs: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	@touch $@

demo: $(VENV)/.examples
	$(ONE_THREAD) $(BIN)/python examples/language_model/demo.py

demo-local: $(VENV)/.examples
	@mkdir -p out
	$(ONE_THREAD) $(BIN)/python examples/language_model/local_sgd.py --plot out/local_sgd.png

test: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# The battery over all reducers, the NumPy reference, and torch beside them.
QUICK := tests/jaxcomp/reducers/test_battery.py tests/jaxcomp/reducers/test_powersgd.py \
	tests/jaxcomp/local/test_torch.py tests/examples/test_ddp_equivalence.py \
	tests/torch_bridge/test_whole_run.py

quick: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --dist worksteal $(QUICK)

# What rounds otherwise must pass too: older kernels in OpenBLAS, XLA, oneDNN and ATen. An
# instruction that the processor lacks would end the process, so they are always older ones. XLA's
# not as old as SSE4_2, which has none for float16: jaxlib 0.10.2 cannot compile a cast to it there.
OLDER = $(if $(shell grep -o -m1 avx512f /proc/cpuinfo),Haswell AVX2 AVX2 avx2,Sandybridge AVX SSE41 default)

elsewhere: export OPENBLAS_CORETYPE = $(word 1,$(OLDER))
elsewhere: export XLA_FLAGS = --xla_cpu_max_isa=$(word 2,$(OLDER))
elsewhere: export ONEDNN_MAX_CPU_ISA = $(word 3,$(OLDER))
elsewhere: export ATEN_CPU_CAPABILITY = $(word 4,$(OLDER))
elsewhere: quick

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# Any warning is an error: a link that leads nowhere, a public name without a place in the reference.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -E -c docs/site -d out/doctrees docs out/docs
	@echo "out/docs/index.html"

format: $(VENV)/.test
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/python docs/include.py

clean:
	rm -rf $(VENV) out .pytest_cache .ruff_cache .hypothesis
