#!/usr/bin/env bash
# Sees to the programs that tests run beside Python and Java. `make test` calls it; safe to run again.
set -euo pipefail

missing=()
# strace: proves that an acknowledgement follows a sync, and makes syncs fail (tests/faults).
command -v strace >/dev/null || missing+=(strace)
[ ${#missing[@]} = 0 ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing the Debian packages ${missing[*]} ..." >&2
    { apt-get update --quiet=2 && apt-get install --quiet=2 --yes --no-install-recommends "${missing[@]}"; } >&2 && exit 0
fi
printf 'test: these programs are needed: %s\nTry: sudo apt-get install %s\n' "${missing[*]}" "${missing[*]}" >&2
exit 1
