#!/bin/sh
# Runs that docs/results shows, and its tables. Needs nothing but the built program and Python 3.
#
#   sh scripts/results.sh RUN [--seeds 0,1,2] [--steps N]   train recipes/RUN.toml once per seed, then the tables
#   sh scripts/results.sh --tables                          only the tables, from the summaries that are there
#
# scripts/results.py says what is written.
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" scripts/results.py "$@"
