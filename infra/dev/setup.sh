#!/usr/bin/env bash
# Makes .venv with the packages that services run on, and a Java if there is none. With a name (emulator, dev): adds the packages
# of infra/lock/NAME.txt to it. `make` calls it; safe to run again. Installs, and builds with, only files whose hash is in a lock.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
pip=(.venv/bin/python -m pip --disable-pip-version-check)

stop() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

at_least_311() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Debian packs these two apart from Python itself.
can_make_venv() {
    "$python" -c 'import ensurepip, venv' 2>/dev/null
}

check_python() {
    at_least_311 "$python" || stop "$python is not a Python 3.11 or newer ($("$python" --version 2>/dev/null || echo "it does not run"))." \
        "Try: install one, then name it: make setup PYTHON=python3.12"
    can_make_venv && return
    local package
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing the Debian package $package ..." >&2
        { apt-get update --quiet=2 && apt-get install --quiet=2 --yes --no-install-recommends "$package"; } >&2 || true
    fi
    can_make_venv || stop "$python cannot make virtual environments." "Try: sudo apt-get install $package"
}

# pip installs what $@ says, without packages that no lock names. Of its many lines only those that show how far it is.
install() {
    "${pip[@]}" install --progress-bar off --no-deps --no-build-isolation "$@" | while IFS= read -r line; do
        if [[ $line =~ Downloading\ ([^ ]+)\ \(([0-9]+)[.0-9]*\ MB\) ]] && ((BASH_REMATCH[2] >= 20)); then
            echo "  downloading ${BASH_REMATCH[1]##*/}, ${BASH_REMATCH[2]} MB" >&2
        elif [[ $line =~ ^\ *Building\ wheel\ for\ ([^ ]+).*started ]]; then
            echo "  building ${BASH_REMATCH[1]}" >&2
        elif [[ $line =~ ^Installing\ collected\ packages:\ (.*) ]]; then
            echo "  unpacking packages: $(wc -w <<<"${BASH_REMATCH[1]}")" >&2
        fi
    done
}

check() {
    "${pip[@]}" check >/dev/null || stop "the packages of infra/lock do not fit together: $("${pip[@]}" check)" \
        "Try: .venv/bin/python infra/dev/lock_packages.py"
}

if [ $# = 1 ]; then
    echo "Installing the packages of infra/lock/$1.txt into .venv ..." >&2
    install --require-hashes --requirement "infra/lock/$1.txt"
    check
    echo "Installed them in $SECONDS s." >&2
    exit
fi

# A set-up that was interrupted leaves a .venv without pip.
if ! at_least_311 .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    check_python
    "$python" -m venv --clear .venv
fi
echo "Installing the packages that Penstock runs on into .venv (a minute or two the first time) ..." >&2
install --require-hashes --only-binary :all: --requirement infra/lock/build.txt
install --require-hashes --requirement infra/lock/services.txt
install --editable .
check

if ! .venv/bin/python -m services.core.jvm.java >&2; then
    echo "Installing a Java into .venv ..." >&2
    install --require-hashes --requirement infra/lock/java.txt
    .venv/bin/python -m services.core.jvm.java >&2 || stop "The installed Java does not run on this machine."
fi
echo "Installed Penstock in $SECONDS s. \`source .venv/bin/activate\` puts \`penstock\` on your path." >&2
