# A thin alias for a machine with nothing but Python 3.11+, make and git. `make demo` and `make test` make .venv first;
# they make it again only when pyproject.toml or PYTHON has changed. Another interpreter: `make test PYTHON=python3.12`.
PYTHON ?= python3
BIN := .venv/bin
MADE := .venv/made-by-$(subst /,_,$(PYTHON)).stamp

# Nothing from outside .venv, and one BLAS thread: bits depend on the number of threads. Compiled files are kept, or
# every rank of every test would compile the package anew.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PYTHONDONTWRITEBYTECODE
export PYTHONNOUSERSITE := 1
export OPENBLAS_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export UV_SYSTEM_CERTS := 1

.PHONY: demo learn test pytest exhaustive chaos fuzz lint lessons booklet site site-test pyodide-test museum mutants peers matrix bench clean
.DELETE_ON_ERROR:

demo: .venv/demo.stamp
	$(BIN)/minidist demo

# The linters run beside the tests, of which some wait for a timeout: three at once on two cores. tests/conftest.py puts
# the longest files first.
test: .venv/test.stamp
	@$(MAKE) --no-print-directory -j 2 lint pytest

pytest: .venv/test.stamp
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Every schedule x stages x micro-batches x optimizer x model, where `make test` runs a sample. About half an hour.
exhaustive: .venv/test.stamp
	$(BIN)/python -m pytest -n 2 -m "exhaustive or hypothesis" --hypothesis-profile=exhaustive

# 200 jobs under mpiexec that are killed, interrupted, stopped or out of disk at random moments. About an hour.
chaos: .venv/test.stamp
	$(BIN)/python -m tests.chaos.chaos --runs 200

# 20,000 wrong inputs of every kind; each is a success or one sentence. Less than an hour.
fuzz: .venv/test.stamp
	$(BIN)/python -m tests.fuzz.campaign --inputs 20000

# Jupyter on the first lesson.
learn: .venv/demo.stamp
	@$(call INSTALL,learn)
	$(BIN)/minidist lesson open

lessons: .venv/test.stamp
	$(BIN)/python -m minidist.course.lesson.build

# The core lessons to print, a spread each: build/booklet.pdf (Debian, Ubuntu: apt-get install chromium).
booklet: .venv/test.stamp
	mkdir -p build
	$(BIN)/python -m minidist.course.lesson.booklet build/booklet.html
	chromium --headless --no-sandbox --no-pdf-header-footer --print-to-pdf=build/booklet.pdf build/booklet.html

# Lessons, guides and the reference as pages with a search, in build/site/html; a link that leads nowhere ends it. A minute.
site: .venv/test.stamp
	@$(call INSTALL,site)
	$(BIN)/python -m website.stage build/site/pages
	rm -rf build/site/html
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs 2 --builder html --doctree-dir build/site/doctrees \
	  --conf-dir website build/site/pages build/site/html
	@echo "open build/site/html/index.html"

# The site in a headless Chromium (Debian, Ubuntu: apt-get install chromium).
site-test: site
	$(BIN)/python -m pytest -n 2 -m site tests/website/test_site.py

# Simulated ranks on WebAssembly, under Node and in Chromium; needs node and npm. See docs/browser.md.
pyodide-test: .venv/test.stamp
	@$(call INSTALL,site)
	npm install --no-fund --no-audit --silent --prefix build/pyodide pyodide@314
	$(BIN)/python -m pytest -n 2 -m site tests/website/test_pyodide.py

museum: .venv/test.stamp
	$(BIN)/minidist museum

# Every planted bug of tests/mutants must turn its test red. A few minutes.
mutants: .venv/test.stamp
	$(BIN)/python -m tests.mutants.mutants_run

# The tests that need PyTorch (its build for CPUs is about 200 MB, that for CUDA several GB): programs of torch.distributed, and comparisons with it;
# then a table of programs on simulated ranks and on real processes with gloo, by number.
peers: .venv/test.stamp
	@$(call INSTALL,peers)
	$(BIN)/python -m pytest -n 2 -m peers
	$(BIN)/python -m tests.torch_ranks.against_gloo

# Every valid layout of 8 ranks against one device, on two cores.
matrix: .venv/demo.stamp
	$(BIN)/minidist compare --matrix --processes 2

bench: .venv/demo.stamp
	$(BIN)/minidist bench collectives
	$(BIN)/minidist bench step

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(MADE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "minidist needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`. Try: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv --clear .venv || { echo "$(PYTHON) cannot make a virtual environment; install its venv module (Debian, Ubuntu: python3-venv)" >&2; exit 1; }
	@touch $@

# Editable, so that an edit needs no second installation. uv is several times as fast as pip, which does it where uv fails.
INSTALL = { $(BIN)/python -m pip install --quiet uv && $(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[$1]'; } \
	  || $(BIN)/python -m pip install --quiet --editable '.[$1]'

.venv/demo.stamp: $(MADE)
	@echo "installing minidist and an MPI library into .venv (less than half a minute)" >&2
	@$(call INSTALL,mpi)
	@touch $@

.venv/test.stamp: $(MADE)
	@echo "installing minidist and what its tests need into .venv (less than a minute)" >&2
	@$(call INSTALL,test)
	@touch $@
