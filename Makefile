# One word for each thing one does here. Every target makes its environment and finds Java by itself: `make run` a small
# one, .venv-run, and all others .venv, which has what the tests need.
#   PYTHON=/path/to/python3.12   the interpreter to build the environments with
#   ARGS="--parallelism 4"       options for run, bench and test
#   WORKERS=4                    how many processes share the tests; 0 runs them in one
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.made-from
RUN_VENV := .venv-run
SPARK := 4.3
OTHER_SPARKS := 4.1 4.2
RELEASE_VENV := .venv-release
TORCH := 2.13.0
TORCH_VENV := .venv-torch
PACKAGES := actors headgate protocol spark_bridge
FOLDERS := $(PACKAGES) tests benchmarks examples
SEED ?=
SEEDS ?=
SCOPE ?=
SECONDS ?= 60
MINUTES ?= 30
RUNS ?= 100
KIND ?= both
# More processes than two cores: the tests on a real Spark wait for processes about half of the time.
WORKERS ?= 3
ARGS ?=
VERSION ?=

# The lock pins the Spark that is used: another one that happens to be installed must not be picked up.
unexport SPARK_HOME PYTHONPATH PYTHONHOME
# Many containers set this. The tests start thousands of processes, and each would compile all modules again: 0.6 s for
# Headgate alone, and 16 s for the tests, in each process that collects them.
unexport PYTHONDONTWRITEBYTECODE
# The workers that Spark forks must find msgpack, so they are this very interpreter.
export PYSPARK_PYTHON := $(CURDIR)/$(PY)
export PYSPARK_DRIVER_PYTHON := $(CURDIR)/$(PY)
# Everything here runs on one machine; a host name that does not resolve must not stop it.
SPARK_LOCAL_IP ?= 127.0.0.1
export SPARK_LOCAL_IP
export PYTHONUNBUFFERED := 1

pip_install = -m pip install --quiet --disable-pip-version-check
# The jars of Spark are compressed already: the wheel that pip builds of it, and installs, leaves them as they are.
export DIST_EXTRA_CONFIG := $(CURDIR)/.ci/stored.cfg
# pip refuses a file whose hash is not in the lock. Spark comes last: what builds it must be there, with its own hashes.
install_locked = $(1)/bin/python $(pip_install) --require-hashes -r $(2) && \
	$(1)/bin/python $(pip_install) --require-hashes --no-deps --no-build-isolation -r $(3) && \
	$(1)/bin/python $(pip_install) --no-deps --no-build-isolation -e .
site_packages = $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
compile = $(RELEASE_VENV)/bin/python -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--custom-compile-command "make lock" $(ARGS)

# A process that ends at the timeout of a hanging test is not replaced: pytest-xdist may then hang itself.
shared_out = --numprocesses $(WORKERS) --dist loadfile --max-worker-restart 0

with_java = JAVA_HOME="$$(.ci/find-java)" && export JAVA_HOME
# Looked for once, because two processes of the tests must not install it at the same time.
with_servers = POSTGRES_BIN="$$(.ci/find-postgres)" && export POSTGRES_BIN && \
	REDIS_SERVER="$$(.ci/find-redis)" && export REDIS_SERVER && \
	PGBOUNCER="$$(.ci/find-pgbouncer)" && export PGBOUNCER
# What not every machine can get: without it, its tests are skipped, and a line says how to get it.
with_browser = { CHROMIUM="$$(.ci/find-chromium)" || :; } && export CHROMIUM && \
	{ IP_COMMAND="$$(.ci/find-ip)" || :; } && export IP_COMMAND
with_all_servers = $(with_servers) && $(with_browser) && { AZURITE_BLOB="$$(.ci/find-azurite)" || :; } && export AZURITE_BLOB && \
	{ PROMETHEUS="$$(.ci/find-prometheus)" || :; } && export PROMETHEUS

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

# A client of Spark Connect needs packages that only the large environment has.
RUN_IN := $(if $(findstring --remote,$(ARGS)),$(VENV),$(RUN_VENV))
.PHONY: run
run: export PYSPARK_PYTHON := $(CURDIR)/$(RUN_IN)/bin/python
run: export PYSPARK_DRIVER_PYTHON := $(CURDIR)/$(RUN_IN)/bin/python
run: $(RUN_IN)/.made-from ## the example job on a real Spark: two attempts are lost, every result counts once
	@$(with_java) && exec $(RUN_IN)/bin/python examples/word_count.py $(ARGS)

.PHONY: test
test: $(STAMP) ## the tests that take minutes, the core of those on a real Spark included
	@$(with_java) && $(with_servers) && $(with_browser) && exec $(PY) -m pytest $(shared_out) $(ARGS)

.PHONY: test-long
test-long: $(STAMP) ## all other tests: the long ones, most of them on a real Spark
	@$(with_java) && $(with_all_servers) && $(PY) -m tests.spark.shared_classes && exec $(PY) -m pytest -m "long and not torch" $(shared_out) --no-loadscope-reorder $(ARGS)

# The workers of Spark must find torch, too.
.PHONY: test-torch
test-torch: export PYSPARK_PYTHON := $(CURDIR)/$(TORCH_VENV)/bin/python
test-torch: export PYSPARK_DRIVER_PYTHON := $(CURDIR)/$(TORCH_VENV)/bin/python
test-torch: $(TORCH_VENV)/.made-from ## the tests that need torch, with a build for machines without a GPU
	@$(with_java) && exec $(TORCH_VENV)/bin/python -m pytest -m torch $(ARGS)

.PHONY: spark
spark: $(STAMP) ## every fault of docs/spark-faults.md, on real clusters, in a driver and over Spark Connect
	@$(with_java) && exec $(PY) -m pytest -m spark tests/spark/faults tests/spark/connect/test_connect_conformance.py \
		--durations 10 $(ARGS)

.PHONY: matrix
matrix: $(STAMP) ## headgate check and tests with each Spark, Python and Java that is here; prints what works
	@$(with_java) && exec $(PY) -m tests.support_matrix $(ARGS)

.PHONY: check
check: $(STAMP) ## format, lint, types and import rules; seconds, no Java
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy $(wildcard $(FOLDERS))
	@$(PY) -m pytest -q tests/test_import_rules.py tests/test_import_cycles.py tests/test_public_surface.py

.PHONY: sim
sim: $(STAMP) ## the simulator: SEED=n replays one world, SEEDS=n tries so many
	@exec $(PY) -m tests.simulation $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

.PHONY: explore
explore: $(STAMP) ## every interleaving of the machines in a small scope: SCOPE=name
	@exec $(PY) -m tests.exploration $(if $(SCOPE),--scope $(SCOPE)) $(ARGS)

.PHONY: coverage
coverage: $(STAMP) ## the branches that no quick test takes; which tests reach which lines, for make mutants
	@$(with_java) && $(with_servers) && $(with_browser) && exec $(PY) -m tests.reached --processes $(WORKERS) $(ARGS)

.PHONY: mutants
mutants: $(STAMP) ## each of the bugs that we fear, put in and caught; ARGS="NAME ..." for some, ARGS="--random N" for others
	@$(with_java) && $(with_servers) && $(with_browser) && exec $(PY) -m tests.mutants $(ARGS)

.PHONY: fuzz
fuzz: $(STAMP) ## hostile bytes and peers for SECONDS=60; SEED=n replays one case
	@exec $(PY) -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: soak
soak: $(STAMP) ## the exactly-once pipeline in a loop, everything dies once in each run; RUNS=1000, SEED=n
	@$(with_java) && exec $(PY) -m examples.exactly_once --runs $(RUNS) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: soak-pipeline
soak-pipeline: $(STAMP) ## pairs of sources and sinks while everything dies: RUNS=30, KIND=real or simulated, SEED=n
	@$(with_java) && $(with_servers) && exec $(PY) -m tests.pipelines --kind $(KIND) --runs $(RUNS) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: soak-daily
soak-daily: $(STAMP) ## the same job ten days in a row, killed on some, for each sink and part: RUNS=1, SEED=n
	@$(with_java) && $(with_servers) && exec $(PY) -m tests.days --runs $(if $(filter command line environment,$(origin RUNS)),$(RUNS),1) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: soak-states
soak-states: $(STAMP) ## large states in files while everything dies, with other parallelisms: RUNS=10, SEED=n
	@$(with_java) && exec $(PY) -m tests.states --runs $(if $(filter command line environment,$(origin RUNS)),$(RUNS),10) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: soak-spark
soak-spark: $(STAMP) ## faults of Spark at random on one cluster and sidecar: MINUTES=30, SEED=n
	@$(with_java) && exec $(PY) -m tests.spark.faults.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: load
load: $(STAMP) ## 2,000 subtasks under load, kills, strangers and a flooding neighbour, for MINUTES=30; SEED=n
	@exec $(PY) -m tests.load --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: bench
bench: $(STAMP) ## the figures of the README, with their raw baselines
	@$(with_java) && exec $(PY) -m benchmarks $(ARGS)

.PHONY: walks
walks: $(STAMP) ## how many modules and calls five ways through the code pass, such as that of an event
	@exec $(PY) -m benchmarks.walks $(ARGS)

.PHONY: hostility
hostility: $(STAMP) ## what one hostile peer costs another operator, for each kind that the fuzzers know: SECONDS=5
	@exec $(PY) -m benchmarks.hostility $(if $(filter command line environment,$(origin SECONDS)),--seconds $(SECONDS)) $(ARGS)

.PHONY: relay
relay: $(STAMP) ## the compiled relays, spark_bridge/bridge/relay.jar, from their Java sources; needs a JDK
	@$(with_java) && exec $(PY) -m tests.release.relay_jar

.PHONY: pictures
pictures: $(STAMP) ## the pictures of Spark's UI in docs/pictures, of a real job in a real Chromium
	@$(with_java) && exec $(PY) -m tests.browser.pictures

.PHONY: docs
docs: $(STAMP) ## the documentation as a site in site/; a broken link or a missing reference is an error
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet $(ARGS) && echo "site/index.html"

.PHONY: docs-version
docs-version: docs ## keep the documentation as VERSION=1.2, and as the latest, in the branch gh-pages; ARGS=--push publishes it
	$(if $(VERSION),,$(error say which version: make docs-version VERSION=1.2))
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mike deploy --update-aliases $(VERSION) latest && \
		$(VENV)/bin/mike set-default $(ARGS) latest

.PHONY: release
release: $(STAMP) $(RELEASE_VENV)/.made-from ## sdist, wheel and SBOM in dist/, checked, and tried with each supported Python here
	@$(with_java) && exec $(PY) -m tests.release --tools $(RELEASE_VENV)/bin/python $(ARGS)

.PHONY: format
format: $(STAMP) ## let ruff rewrite what it can
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

.PHONY: venv
venv: $(STAMP) ## only build .venv

.PHONY: lock
lock: $(RELEASE_VENV)/.made-from ## write the locks from pyproject.toml; ARGS=--upgrade raises the versions
	@for spark in $(OTHER_SPARKS) $(SPARK); do \
		echo "pyspark==$$spark.*" | $(compile) --no-deps --no-annotate -o requirements-spark-$$spark.lock - || exit; \
	done
	@$(compile) pyproject.toml --extra pyspark --group build --group dev --group docs \
		-c requirements-spark-$(SPARK).lock --no-emit-package pyspark -o requirements.lock
	@$(compile) pyproject.toml --extra pyspark --group build -c requirements.lock \
		-c requirements-spark-$(SPARK).lock --no-emit-package pyspark -o requirements-run.lock
	@$(compile) --group torch -c requirements.lock -o requirements-torch.lock
	@$(compile) --group release -o requirements-release.lock

.PHONY: clean
clean: ## remove all environments and all that tools left behind
	@rm -rf .azurite .mutants .coverage* $(VENV) $(RUN_VENV) $(RELEASE_VENV) $(TORCH_VENV) .venv-spark-* build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache \
		.hypothesis spark-warehouse metastore_db derby.log
	@find $(wildcard $(FOLDERS)) -name __pycache__ -type d -prune -exec rm -rf {} +

# Built anew when the pins change. The stamp is written last, so that a broken build is not taken for a good one.
$(STAMP): requirements.lock requirements-spark-$(SPARK).lock
	@python="$$(.ci/find-python)" && \
		echo "headgate: building .venv with $$("$$python" --version) (once; a minute or two)" >&2 && \
		rm -rf $(VENV) && \
		"$$python" -m venv $(VENV) && \
		$(call install_locked,$(VENV),requirements.lock,requirements-spark-$(SPARK).lock) && \
		cp requirements.lock $@

$(RUN_VENV)/.made-from: requirements-run.lock requirements-spark-$(SPARK).lock
	@python="$$(.ci/find-python)" && \
		echo "headgate: building $(@D) with Spark $(SPARK) (once; a minute)" >&2 && \
		rm -rf $(@D) && \
		"$$python" -m venv $(@D) && \
		$(call install_locked,$(@D),$<,requirements-spark-$(SPARK).lock) && \
		cp $< $@

$(RELEASE_VENV)/.made-from: requirements-release.lock
	@python="$$(.ci/find-python)" && \
		echo "headgate: building $(@D) (once; a minute)" >&2 && \
		rm -rf $(@D) && \
		"$$python" -m venv $(@D) && \
		$(@D)/bin/python $(pip_install) --require-hashes -r $< && \
		cp $< $@

# Everything except torch, and what only torch needs, comes from .venv. pip takes the build without CUDA where an index or
# a folder that it looks at has one; what CUDA needs is not installed, so torch does not start with another build.
$(TORCH_VENV)/.made-from: $(STAMP) requirements-torch.lock
	@echo "headgate: building $(@D) with torch $(TORCH) (once; a minute)" >&2 && \
		rm -rf $(@D) && \
		$(PY) -m venv --without-pip $(@D) && \
		echo "import site; site.addsitedir('$(call site_packages,$(VENV))')" >"$(call site_packages,$(@D))/venv.pth" && \
		$(@D)/bin/python $(pip_install) --require-hashes -r requirements-torch.lock && \
		$(@D)/bin/python $(pip_install) --no-deps torch==$(TORCH) && \
		{ $(@D)/bin/python -c "import torch" || { \
			echo "headgate: this torch does not start here. Name an index with builds for machines without a GPU:" \
				"PIP_EXTRA_INDEX_URL=... make test-torch" >&2; exit 1; }; } && \
		cp requirements-torch.lock $@

# The environments of `make matrix`: .venv-spark-4.1-python3.12.
.SECONDEXPANSION:
.venv-spark-%/.made-from: requirements.lock requirements-spark-$$(firstword $$(subst -, ,$$*)).lock
	@python="$$(.ci/find-python)" && \
		echo "headgate: building $(@D) (once; some minutes, for Spark is built from its sources)" >&2 && \
		rm -rf $(@D) && \
		"$$python" -m venv $(@D) && \
		$(call install_locked,$(@D),requirements.lock,$(word 2,$^)) && \
		cp requirements.lock $@
