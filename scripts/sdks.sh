#!/bin/sh
# The official SDKs that tests speak through, at fixed versions, in a folder of the user's cache.
#
#   sh scripts/sdks.sh where      print the folder
#   sh scripts/sdks.sh install    install what is missing
set -eu

PYTHON="openai==3.57.0 anthropic==2.14.0 google-genai==3.6.1"
NODE="openai@7.59.0 @anthropic-ai/sdk@1.14.0 @google/genai@3.3.0"

cache=${XDG_CACHE_HOME:-$HOME/.cache}/espalier
version=$(printf '%s' "$PYTHON $NODE" | cksum | cut -d ' ' -f 1)
folder=$cache/sdks-$version

case "${1:-}" in
where)
    echo "$folder"
    exit 0
    ;;
install) ;;
*)
    echo "sdks: expected where or install" >&2
    exit 2
    ;;
esac

[ -f "$folder/complete" ] && exit 0
echo "setup: installing the SDKs that tests use into $folder"
mkdir -p "$cache"
partial=$(mktemp -d "$cache/.sdks-XXXXXX")
trap 'rm -rf "$partial"' EXIT
# shellcheck disable=SC2086 # lists of words
/usr/bin/python3 -m pip install --quiet --no-input --disable-pip-version-check \
    --target "$partial/site" $PYTHON
# shellcheck disable=SC2086
npm install --silent --no-audit --no-fund --ignore-scripts --save-exact --prefix "$partial" $NODE
touch "$partial/complete"
# Whoever was faster has the same.
mv -T "$partial" "$folder" 2>/dev/null || [ -f "$folder/complete" ]
