# make all: the embedded experiment, from a bare clone to a verdict. make test: the tests.
# make bench: the model beside transformers' on this CPU, mode by mode; OPTIONS="--quick --modes fp32-eager" for less.
PYTHON ?= python3
CONFIG ?= config/default.yaml
ENV := envs/cpu.txt
BIN := .venv/bin
PATHS := src tests

.PHONY: all test bench lint format clean
all: .venv/installed
	$(BIN)/snakemake --configfile $(CONFIG) -- all
	@$(BIN)/python src/scripts/show_verdict.py $(addprefix --config ,$(CONFIG))

test: .venv/peers
	$(BIN)/python -m pytest

bench: .venv/peers
	$(BIN)/python src/scripts/bench.py $(OPTIONS)

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

# What a comparison with other implementations needs beside it; small, so that the tests try it too.
.venv/peers: envs/peers.txt .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

clean:
	rm -rf .venv .snakemake logs
