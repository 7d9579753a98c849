#!/bin/sh
# What a container of atoll starts, by its first argument:
#
#   bootstrap [OPTIONS]   a well-known peer. Serves the manifest at ATOLL_MANIFEST, else the one mounted at
#                         /etc/atoll/manifest.toml, else one that it makes and signs itself, once.
#   node [OPTIONS]        a volunteer. Takes ATOLL_ADDRESS, or waits for the file ATOLL_ADDRESS_FILE.
#   probe HOST PORT ...   the health check of a bootstrap peer.
#   anything else         a command of atoll (status, manifest, generate, ...), or a program.
#
# Every option of the commands has an ATOLL_ variable; `atoll node --help` lists them.
set -eu

state=${ATOLL_STATE:-/state}

# The run address is written when the bootstrap peer answers; a node may well be started before that.
wait_for_address() {
    limit=${ATOLL_ADDRESS_WAIT:-300}
    waited=0
    while [ ! -s "$ATOLL_ADDRESS_FILE" ]; do
        if [ "$waited" -ge "$limit" ]; then
            echo "atoll: error: no run address in $ATOLL_ADDRESS_FILE after $limit s; is the bootstrap peer up?" >&2
            exit 4
        fi
        if [ "$waited" -eq 0 ]; then echo "atoll: waiting for a run address in $ATOLL_ADDRESS_FILE" >&2; fi
        sleep 1
        waited=$((waited + 1))
    done
}

make_manifest() {
    echo "atoll: no manifest was given; making and signing one of ${ATOLL_ROUNDS:-60} rounds" >&2
    # Under its name only when it is complete.
    draft=$state/.manifest.part.toml
    rm -f "$draft"
    atoll manifest new --name compose --rounds "${ATOLL_ROUNDS:-60}" -o "$draft" >/dev/null
    atoll manifest sign "$draft" --key "$state/owner.key" >/dev/null
    mv "$draft" "$ATOLL_MANIFEST"
}

case "${1:-node}" in
bootstrap)
    shift
    if [ -z "${ATOLL_MANIFEST:-}" ]; then
        # What compose mounts where there is no manifest has no content.
        if [ -s /etc/atoll/manifest.toml ]; then
            ATOLL_MANIFEST=/etc/atoll/manifest.toml
        else
            ATOLL_MANIFEST=$state/manifest.toml
            if [ ! -e "$ATOLL_MANIFEST" ]; then make_manifest; fi
        fi
        export ATOLL_MANIFEST
    fi
    exec atoll bootstrap "$@"
    ;;
node)
    if [ "$#" -gt 0 ]; then shift; fi
    if [ -z "${ATOLL_ADDRESS:-}" ] && [ -n "${ATOLL_ADDRESS_FILE:-}" ]; then
        wait_for_address
        export ATOLL_ADDRESS="@$ATOLL_ADDRESS_FILE"
    fi
    exec atoll node "$@"
    ;;
probe)
    shift
    exec python3 /usr/local/lib/atoll-probe.py "$@"
    ;;
*)
    # A command of atoll, unless there is a program of that name.
    if command -v "$1" >/dev/null 2>&1; then exec "$@"; fi
    exec atoll "$@"
    ;;
esac
