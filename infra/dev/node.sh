#!/usr/bin/env bash
# Installs Node.js and npm, which run the Kinesis emulator and clients of the registry. `make` calls it; safe to run again, quick when they are there.
set -euo pipefail

have_node() {
    command -v node >/dev/null && command -v npm >/dev/null
}

if ! have_node && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing the Debian packages nodejs and npm ..." >&2
    { apt-get update --quiet=2 && apt-get install --quiet=2 --yes --no-install-recommends nodejs npm; } >&2 || true
fi
if ! have_node; then
    printf 'setup: %s\n' "Node.js and npm are needed to run the Kinesis emulator." "Try: sudo apt-get install nodejs npm" >&2
    exit 1
fi
