#!/bin/sh
# Start one Valkey. The password goes from its Secret into a file that only the server reads, never into a command line.
# STORE_USER: the one user there is then, who may do nothing to the server itself; without it, the default user.
# PRIMARY (class C3 only): the pod that takes writes; every other pod replicates it. PEERS: all pods.
# Certificates in TLS_DIR: TLS and nothing else, and only for who shows a certificate of the same CA.
set -eu
umask 077
run="${RUN_DIR:-/run/store}"
tls="${TLS_DIR:-/etc/store/tls}"
conf="$run/valkey.conf"
password=$(cat "${SECRET_DIR:-/etc/store/secret}/password")
cp "${CONF_DIR:-/etc/store/conf}/valkey.conf" "$conf"
say() { printf '%s\n' "$@" >> "$conf"; }

say "" "unixsocket $run/valkey.sock" "unixsocketperm 700" # for the probes
if [ -n "${STORE_USER:-}" ]; then
    say "user default off" \
        "user $STORE_USER on \">$password\" ~seqmtp:* resetchannels +@all -@admin -@dangerous +info +config|get" \
        "user replica on \">$password\" resetchannels +ping +psync +replconf" \
        "masteruser replica"
else
    say "requirepass \"$password\""
fi
say "masterauth \"$password\""

ask() { REDISCLI_AUTH="$password" timeout 5 valkey-cli --user "${STORE_USER:-default}" "$@" 2> /dev/null; }
if [ -e "$tls/tls.crt" ]; then
    say "port 0" "tls-port 6379" "tls-replication yes" "tls-auth-clients yes" "tls-auto-reload-interval 600" \
        "tls-cert-file $tls/tls.crt" "tls-key-file $tls/tls.key" "tls-ca-cert-file $tls/ca.crt"
    ask_peer() { ask --tls --cacert "$tls/ca.crt" --cert "$tls/tls.crt" --key "$tls/tls.key" "$@"; }
else
    ask_peer() { ask "$@"; }
fi

if [ -n "${PRIMARY:-}" ] && [ "$POD_NAME" != "$PRIMARY" ]; then
    say "replicaof $PRIMARY.store-peers 6379"
elif [ -n "${PRIMARY:-}" ] && [ ! -e "${DATA_DIR:-/data}/appendonlydir" ]; then
    # A primary that comes back without its data would make its replicas as empty as it is.
    for peer in $PEERS; do
        [ "$peer" = "$PRIMARY" ] && continue
        held=$(ask_peer -h "$peer.store-peers" dbsize) || continue
        if [ "$held" != 0 ]; then
            echo "$PRIMARY has no data and $peer has: not started. Promote $peer: see docs/deploy.md, 'Promotion'." >&2
            exit 1
        fi
    done
fi
exec valkey-server "$conf"
