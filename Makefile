# make all: the embedded experiment, from a bare clone to a verdict. make test: the tests.
PYTHON ?= python3
CONFIG ?= config/default.yaml
ENV := envs/cpu.txt
BIN := .venv/bin
PATHS := src tests

.PHONY: all test lint format clean
all: .venv/installed
	$(BIN)/snakemake --configfile $(CONFIG) -- all
	@$(BIN)/python src/scripts/show_verdict.py $(addprefix --config ,$(CONFIG))

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check $(PATHS)
	$(BIN)/ruff format --check $(PATHS)
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/snakemake --lint

format: .venv/installed
	$(BIN)/ruff check --fix $(PATHS)
	$(BIN)/ruff format $(PATHS)
	$(BIN)/snakefmt Snakefile rules

# The pinned environment; made anew when the pins or the package's needs change.
.venv/installed: $(ENV) pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(ENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

clean:
	rm -rf .venv .snakemake logs
