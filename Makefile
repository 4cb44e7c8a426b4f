# Two commands for a newcomer: `make demo` and `make test`. Both set up everything they need in .venv.
# With Transformer Engine as well: `make test-te`, which builds it once.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed

.PHONY: demo test te test-te lint bench clean

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 $(ARGS)

# Transformer Engine, for recipes with its own layers; TE_VERSION=2.14.0 for another than the default.
te: $(INSTALLED)
	$(BIN)/python -m pytest_mbmem.te.install $(if $(TE_VERSION),--version $(TE_VERSION))

# What needs it, none of which may be skipped.
test-te: te
	MBMEM_REQUIRE_TE=1 $(BIN)/python -m pytest -n 2 tests/te tests/published tests/documents $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python benchmarks/run.py

# The CUDA build of torch is what pip installs on Linux unless told otherwise; the virtual GPU needs it.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
