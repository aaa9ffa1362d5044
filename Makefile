# make all: the embedded experiment, from a bare clone to a verdict. make test: the tests.
# make bench: the model beside transformers' on this CPU, mode by mode; OPTIONS="--quick --modes fp32-eager" for less.
# make allocation: the same graph as one SLURM job, on one GPU, with what `slurm` in CONFIG says; BUDGET=90 stops sooner.
PYTHON ?= python3
CONFIG ?= config/default.yaml
ENV := envs/cpu.txt
BIN := .venv/bin
PATHS := src tests

.PHONY: all allocation test bench lint format clean
all: .venv/installed
	$(BIN)/snakemake --configfile $(CONFIG) -- all
	@$(BIN)/python src/scripts/show_verdict.py $(addprefix --config ,$(CONFIG))

# Data are fetched here, where the network is; the compute node may have none. The pins for GPU hosts keep a torch that is
# there already.
allocation: ENV := envs/cuda.txt
allocation: .venv/installed
	$(BIN)/snakemake --configfile $(CONFIG) -- fetch_data
	$(BIN)/python src/scripts/allocate.py $(addprefix --config ,$(CONFIG)) $(addprefix --budget-minutes ,$(BUDGET))

test: .venv/test
	$(BIN)/python -m pytest -n 2 --dist loadfile

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

# What a comparison with other implementations needs beside it, and what the tests do.
.venv/peers: envs/peers.txt .venv/installed
.venv/test: envs/test.txt envs/peers.txt .venv/installed
.venv/peers .venv/test:
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

clean:
	rm -rf .venv .snakemake logs
