#!/usr/bin/env bash
# Puts the Kinesis emulator of infra/dev/emulator into .venv. `make setup` calls it; safe to run again, quick when it is there.
set -euo pipefail
cd "$(dirname "$0")/../.."
emulator=.venv/emulator

have_node() {
    command -v node >/dev/null && command -v npm >/dev/null
}

stop() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

if [ -e "$emulator/.done" ] && cmp --silent infra/dev/emulator/package-lock.json "$emulator/package-lock.json"; then
    exit 0
fi
if ! have_node && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing the Debian packages nodejs and npm ..." >&2
    { apt-get update --quiet=2 && apt-get install --quiet=2 --yes --no-install-recommends nodejs npm; } >&2 || true
fi
have_node || stop "Node.js and npm are needed to run the Kinesis emulator." "Try: sudo apt-get install nodejs npm"
echo "Installing the Kinesis emulator into .venv ..." >&2
mkdir -p "$emulator"
cp infra/dev/emulator/package.json infra/dev/emulator/package-lock.json "$emulator/"
npm ci --prefix "$emulator" --ignore-scripts --no-audit --no-fund --silent >&2 || stop "npm could not install the Kinesis emulator."
touch "$emulator/.done"
