#!/usr/bin/env bash
# Make or update a virtual environment: tools/setup.sh VENV TORCH EXTRAS
# Called by `make setup`, which skips it while nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1 torch=$2 extras=$3
min_free_gb=9 # torch with its CUDA libraries takes 6, pip's downloads the rest

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_new_enough "$PYTHON" && echo "$PYTHON" && return
        die "Python >= 3.11 is needed, but PYTHON=$PYTHON is" \
            "$("$PYTHON" --version 2>&1 | head -n 1)"
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        is_new_enough "$candidate" && echo "$candidate" && return
    done
    die "Python >= 3.11 is needed; python3 is $(python3 --version 2>&1 | head -n 1)." \
        "Install one and run: make setup PYTHON=/path/to/python3.12"
}

# Where torch is installed, the large downloads are done.
if ! compgen -G "$venv/lib/python*/site-packages/torch/version.py" >/dev/null; then
    free_gb=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1024 / 1024))
    [ "$free_gb" -ge "$min_free_gb" ] ||
        die "the disk of $PWD is nearly full: $free_gb GB free, $min_free_gb GB needed"
fi

if ! [ -x "$venv/bin/pip" ] || ! is_new_enough "$venv/bin/python"; then
    python=$(find_python)
    rm -rf "$venv"
    "$python" -m venv "$venv" || {
        rm -rf "$venv"
        die "$python cannot make a virtual environment (on Debian: apt-get install python3-venv)"
    }
fi

echo "setup: installing $torch and the extras $extras into $venv"
# The newest pip first: old ones resolve the same packages twenty times slower.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
"$venv/bin/python" -m pip install --quiet "$torch" --editable ".[$extras]"
echo "setup: done; activate it with: source $venv/bin/activate"
