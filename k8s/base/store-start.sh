#!/bin/sh
# Start one Valkey. The password goes from its Secret into a file that only the server reads, never into a command line.
# PRIMARY (class C3 only): the pod that takes writes; every other pod replicates it. PEERS: all pods.
set -eu
umask 077
conf="${RUN_DIR:-/run/store}/valkey.conf"
password=$(cat "${SECRET_DIR:-/etc/store/secret}/password")
cp "${CONF_DIR:-/etc/store/conf}/valkey.conf" "$conf"
printf '\nrequirepass "%s"\nmasterauth "%s"\n' "$password" "$password" >> "$conf"

if [ -n "${PRIMARY:-}" ] && [ "$POD_NAME" != "$PRIMARY" ]; then
    echo "replicaof $PRIMARY.store-peers 6379" >> "$conf"
elif [ -n "${PRIMARY:-}" ] && [ ! -e "${DATA_DIR:-/data}/appendonlydir" ]; then
    # A primary that comes back without its data would make its replicas as empty as it is.
    for peer in $PEERS; do
        [ "$peer" = "$PRIMARY" ] && continue
        held=$(REDISCLI_AUTH="$password" timeout 5 valkey-cli -h "$peer.store-peers" dbsize 2> /dev/null) || continue
        if [ "$held" != 0 ]; then
            echo "$PRIMARY has no data and $peer has: not started. Promote $peer: see docs/deploy.md, 'Promotion'." >&2
            exit 1
        fi
    done
fi
exec valkey-server "$conf"
