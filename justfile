# Each recipe is a plain command, also told in docs/CONTRIBUTING.md.

bin := ".venv/bin"

# A virtual environment with all that the tests need.
setup:
    python3 -m venv .venv
    {{bin}}/pip install -c constraints.txt -e '.[test]'

# What a commit must pass.
lint:
    {{bin}}/ruff check .
    {{bin}}/ruff format --check .
    {{bin}}/mypy

# All tests, some minutes.
test:
    {{bin}}/pytest -n auto --dist loadfile

# What takes a minute: units, errors, the manifest, the planner, the rules of the house.
quick:
    {{bin}}/pytest tests/test_house.py tests/test_units_errors.py tests/base/test_dtypes.py tests/storage/test_manifest.py tests/plan/test_cost.py tests/plan/test_plan.py

# The site, into site/; a warning is an error.
site:
    {{bin}}/sphinx-build -q -W -c docs . site

# Files as strangers make them.
fuzz seconds="60" dir="/tmp/featstore-fuzz":
    {{bin}}/python tests/fuzz/run.py --seconds {{seconds}} --dir {{dir}}

# All benchmarks, in a directory on the device to measure.
bench dir:
    {{bin}}/python benchmarks/run.py --dir {{dir}}
    {{bin}}/python benchmarks/report.py
