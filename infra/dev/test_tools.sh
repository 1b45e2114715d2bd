#!/usr/bin/env bash
# Installs the programs that tests run beside Python and Java. `make test` calls it; safe to run again.
set -euo pipefail

# strace: proves that an acknowledgement follows a sync, and makes syncs fail (tests/faults).
# mount: a small disk that gets full (tests/faults). openssl: a certificate (tests/unit/expel). curl: the README's commands.
# chromium: the observer's page (tests/browser). promtool: the rules of infra/prometheus (tests/unit/infra).
# postgres: reference data (tests/spark), and what Debezium reads (tests/integration). Each is a Debian package of its own name, but promtool.
declare -A package=([promtool]=prometheus)
missing=()
for program in strace mount openssl curl chromium promtool; do
    command -v "$program" >/dev/null || missing+=("${package[$program]:-$program}")
done
# Its programs are not on the path.
compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null || missing+=(postgresql)

if [ "$(id -u)" != 0 ]; then
    echo "test: without root the tests of a full disk fail, because they mount one. Try: sudo make test" >&2
fi
[ ${#missing[@]} = 0 ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing the Debian packages ${missing[*]} ..." >&2
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update --quiet=2 && apt-get install --quiet=2 --yes --no-install-recommends "${missing[@]}"; } >&2 && installed=yes
fi
if [ "${installed:-}" = yes ]; then
    if [[ " ${missing[*]} " = *" prometheus "* ]]; then
        # Only promtool is needed; stop the service that the package may start. So with PostgreSQL.
        { service prometheus stop; update-rc.d prometheus disable; } >/dev/null 2>&1 || true
    fi
    if [[ " ${missing[*]} " = *" postgresql "* ]]; then
        { service postgresql stop; update-rc.d postgresql disable; } >/dev/null 2>&1 || true
    fi
    exit 0
fi
printf 'test: these programs are needed: %s\nTry: sudo apt-get install %s\n' "${missing[*]}" "${missing[*]}" >&2
exit 1
