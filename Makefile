# CacheX FS. Each target sets up what it needs (system packages, .venv) on a bare Debian machine, once.
#   make demo [ARGS="--ranks 32"]   several nodes on this machine: save, lose a node, restore
#   make test [ARGS="-k drain"]     all tests          make check   format, lint, types, imports
#   make test LANES=2               the same, two directories at a time: three fifths of the time
#   make crashsim [SEEDS=0-999]     the engine simulated from seeds, with deaths and power cuts
#   make chaos [SEEDS=1-8]          real mounts under kill -9, restarts, saves and random operations; minutes per seed
#   make bench, make bench-model    measurements       make install a copy in PREFIX (/opt/cachexfs), linked into the PATH
SHELL := /bin/bash
PY := .venv/bin/python
PYTHON ?=
PREFIX ?= /opt/cachexfs
BINDIR ?= /usr/local/bin
SBINDIR ?= /sbin
MANDIR ?= /usr/local/share/man
ARGS ?=
LANES ?=

.DEFAULT_GOAL := help
.PHONY: help demo test crashsim chaos check format bench bench-model install install-helpers clean system test-system venv

help:
	@sed -n 2,8p Makefile

system:
	@tools/setup.sh system

test-system:
	@tools/setup.sh test-system

venv: system
	@tools/setup.sh venv

demo: venv
	$(PY) -m cachexfs demo $(ARGS)

# LANES=2: a pytest for each directory, two at a time.
test: test-system venv
	$(PY) $(if $(LANES),tools/side_by_side.py $(LANES),-m pytest $(ARGS))

# The engine with deaths, power cuts and a PFS that fails, from seeds; prints those that break a promise.
crashsim: venv
	PYTHONHASHSEED=0 $(PY) tests/sim/sim_run.py --keep-going --seeds $(or $(SEEDS),0-999)

# Each seed one way of mounting and one kind of trouble, ARGS="--seconds 300" longer; prints what went wrong with the log.
chaos: test-system venv
	$(PY) tests/chaos/chaos_run.py all --seeds $(or $(SEEDS),1-8) $(ARGS)

check: venv
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports

format: venv
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

# Of the whole mount, then of its parts. Alone on the machine; each prints both sides of its ratios.
# Each row names its bound; the end is an error when one was missed. ARGS: a mount of yours is measured as well.
bench: venv
	if [ -n "$(ARGS)" ]; then $(PY) -m cachexfs bench $(ARGS); fi
	mkdir -p .make/bench-pfs
	missed=; \
	run() { echo "== $$*"; $(PY) "$$@" || missed="$$missed $$1"; }; \
	run bench/bench_catalogue.py; run bench/bench_peer.py; run bench/bench_drain.py .make/bench-pfs; run bench/bench_scale.py; \
	if [ "$$(id -u)" = 0 ]; then run bench/bench_supervisor.py; run bench/bench_mount.py; run bench/bench_frameworks.py; run bench/bench_contention.py; \
	else echo "bench_supervisor, bench_mount, bench_frameworks and bench_contention need root: not measured"; fi; \
	if [ -n "$$missed" ]; then echo "a bound was missed (or it failed):$$missed"; exit 1; fi

bench-model: venv
	$(PY) bench/bench_model.py $(ARGS)

# For a cluster: PREFIX on a directory that all nodes see or have; without torch and without the tools of development.
install: system
	PYTHON="$(PYTHON)" VENV="$(PREFIX)" tools/setup.sh prefix
	mkdir -p $(BINDIR) $(SBINDIR) $(PREFIX)/libexec
	install -m 755 mount_helpers/slurm/{prolog,epilog,common}.sh $(PREFIX)/libexec/
	ln -sfn $(PREFIX)/bin/cachexfs $(BINDIR)/cachexfs
	ln -sfn $(PREFIX)/bin/mount.cachexfs $(SBINDIR)/mount.cachexfs
	install -Dm 644 -t $(MANDIR)/man1 docs/man/*.1
	install -Dm 644 -t $(MANDIR)/man8 docs/man/*.8
	@echo "installed: $(BINDIR)/cachexfs, $(SBINDIR)/mount.cachexfs, manuals below $(MANDIR), Slurm scripts in $(PREFIX)/libexec"

# For a developer: mount(8) finds this checkout.
install-helpers: venv
	ln -sfn $(CURDIR)/.venv/bin/cachexfs $(BINDIR)/cachexfs
	ln -sfn $(CURDIR)/.venv/bin/mount.cachexfs $(SBINDIR)/mount.cachexfs

clean:
	rm -rf .venv .make build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
