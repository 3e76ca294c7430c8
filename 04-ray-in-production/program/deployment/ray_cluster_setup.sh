#!/usr/bin/env bash
# A Ray cluster on machines that you have.
#
#   ray_cluster_setup.sh start HEAD [HOST...]   the head on the first host, and a node on each of the others
#   ray_cluster_setup.sh status                 what Ray says of it
#   ray_cluster_setup.sh stop                   ends what `start` has started, and nothing else
#
# A host is what ssh takes, such as ubuntu@10.0.0.5, or localhost for this machine (each time it is named: one more node).
# Every host needs the workshop's environment. Who is to use the cluster needs its token: `start` makes one, and a file
# to source. The dashboard listens on the head's own 127.0.0.1; from elsewhere use a tunnel, as `start` prints it.
#
#   RAY_CLUSTER_DIR   notes on the cluster (default: ~/.ray-cluster); another folder, another cluster
#   PYTHON            the environment's interpreter, on every host (default: the `python` found here)
#   HEAD_CPUS         CPUs of the head's node that may train (default: all; 0 keeps it free)
#   HEAD_IP           where the other hosts reach the head (default: its first address)
#   RAY_TMPDIR        as set on a host: a short path for Ray's logs and sockets (default: ray-USER in TMPDIR or /tmp)
#   RAY_PORT, DASHBOARD_PORT   of the head (default: 6379 and 8265; 0: a free one)
set -euo pipefail

NOTES=${RAY_CLUSTER_DIR:-$HOME/.ray-cluster}
THERE="\"\$HOME/.ray-cluster\""  # on a host, where the home may be another one
[ -z "${RAY_CLUSTER_DIR:-}" ] || THERE=$(printf %q "$NOTES")
PYTHON=${PYTHON:-$(command -v python || true)}
# Below the ports that Linux hands out to whoever wants any, lest it is another's a moment later; above Ray's workers'.
# Each port of a node has a remainder of its own, modulo 8, so that no two of them are drawn alike.
FREE_PORT='import random, socket, sys
wanted, remainder = map(int, sys.argv[1:])
for port in [wanted] if wanted else random.sample(range(20_000 + remainder, 29_000, 8), 100):
    try:
        socket.create_server(("", port)).close()
    except OSError:
        continue
    print(port)
    sys.exit()
sys.exit(f"port {wanted} is taken")'

fail() {
    echo "error: $*" >&2
    exit 2
}

# Run the script that standard input brings, on HOST. (So the token is in no command line, where `ps` would show it.)
on() {
    if [ "$1" = localhost ]; then bash -s; else ssh -o BatchMode=yes -o ConnectTimeout=10 "$1" bash -s; fi
}

# free_port HOST WANTED REMAINDER: that port, or for 0 any that is free.
free_port() {
    on "$1" <<< "$(printf '%q ' "$PYTHON" -c "$FREE_PORT" "$2" "$3")"
}

# advice CODE HOST NAME: what to do where free_port has ended with CODE; 255 is ssh's own.
advice() {
    if [ "$1" = 255 ]; then echo "does \`ssh $2\` work?"; else echo "set $3 to another port, or 0"; fi
}

# start_node HOST NAME OPTIONS...: `ray start`, and wait until it is up.
start_node() {
    local host=$1 name=$2 pid
    shift 2
    pid=$(on "$host" <<END
set -eu
umask 077
mkdir -p $THERE
cd $THERE
printf %s $(printf %q "$TOKEN") > token
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="\$PWD/token"
# Ray keeps a file with a fixed name in its folder; in /tmp/ray it would be the file of whoever came first.
export RAY_TMPDIR="\${RAY_TMPDIR:-\${TMPDIR:-/tmp}/ray-\$(id -un)}"
export DASHBOARD_METRIC_PORT=\$($(printf %q "$PYTHON") -c $(printf %q "$FREE_PORT") 0 3)
export AUTOSCALER_METRIC_PORT=\$($(printf %q "$PYTHON") -c $(printf %q "$FREE_PORT") 0 4)
agent=\$($(printf %q "$PYTHON") -c $(printf %q "$FREE_PORT") 0 5)
setsid $(printf %q "$PYTHON") -m ray.scripts.scripts start --block --disable-usage-stats --log-color=false \
    --dashboard-agent-listen-port="\$agent" $(printf '%q ' "$@") > $name.log 2>&1 < /dev/null &
pid=\$!
for _ in \$(seq 600); do
    if grep -q "Ray runtime started" $name.log; then echo "\$pid"; exit; fi
    kill -0 "\$pid" 2> /dev/null || break
    sleep 0.2
done
cat $name.log >&2
kill "\$pid" 2> /dev/null || true
exit 1
END
    ) || { echo "error: no node on $host" >&2; return 1; }
    echo "$host $pid" >> "$NOTES/nodes"
    echo "$host: $name is up (process $pid)"
}

start() {
    [ $# -ge 1 ] || fail "start needs a host at least: start HEAD [HOST...]"
    [ ! -e "$NOTES/nodes" ] || fail "$NOTES knows a cluster: stop it first, or set RAY_CLUSTER_DIR to another folder"
    [ -n "$PYTHON" ] || fail "no python found: activate the workshop's environment, or set PYTHON"
    local head=$1 port dashboard ip number=0 cpus=() again
    shift
    [ -z "${HEAD_CPUS:-}" ] || cpus=(--num-cpus "$HEAD_CPUS")
    "$PYTHON" -c 'import ray' 2> /dev/null || fail "$PYTHON has no ray: activate the workshop's environment, or set PYTHON"
    port=$(free_port "$head" "${RAY_PORT:-6379}" 0) || fail "no head on $head: $(advice $? "$head" RAY_PORT)"
    dashboard=$(free_port "$head" "${DASHBOARD_PORT:-8265}" 1) || fail "no head on $head: $(advice $? "$head" DASHBOARD_PORT)"
    ip=${HEAD_IP:-$(on "$head" <<< "hostname -I | cut -d' ' -f1")}
    TOKEN=$("$PYTHON" -c 'import secrets; print(secrets.token_hex(32))')
    umask 077
    mkdir -p "$NOTES"
    touch "$NOTES/nodes"
    trap 'stop; exit 1' INT TERM HUP
    start_node "$head" head --head --node-ip-address="$ip" --port="$port" --dashboard-port="$dashboard" \
        --ray-client-server-port="$(free_port "$head" 0 2)" "${cpus[@]}" || { stop; exit 1; }
    for host in "$@"; do  # one after the other: of two that join at once, one may die
        number=$((number + 1))
        again=()  # the log monitor of this machine's first node reads for all of them
        [ "$head $host" != "localhost localhost" ] || again=(--include-log-monitor=false)
        start_node "$host" "node-$number" --address="$ip:$port" "${again[@]}" || { stop; exit 1; }
    done
    trap - INT TERM HUP
    printf %s "$TOKEN" > "$NOTES/token"
    cat > "$NOTES/env" <<END
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$(printf %q "$NOTES/token")
export RAY_ADDRESS=$ip:$port RAY_API_SERVER_ADDRESS=http://127.0.0.1:$dashboard
END
    [ "$head" = localhost ] || echo "its dashboard, here: ssh -N -L $dashboard:127.0.0.1:$dashboard $head"
    echo "to use it: source $NOTES/env"
}

status() {
    [ -e "$NOTES/env" ] || fail "$NOTES knows no cluster that is up"
    # shellcheck source=/dev/null
    . "$NOTES/env"
    "$PYTHON" -m ray.scripts.scripts status --address "$RAY_ADDRESS"
}

stop() {
    trap - INT TERM HUP
    [ -e "$NOTES/nodes" ] || fail "$NOTES knows no cluster"
    local host pid failed=0
    # Not `ray stop`: it ends every Ray process of a machine, whoever has started it. The head goes last.
    while read -r host pid; do
        if on "$host" <<END; then
is_ours() { ps -o args= -p $pid 2> /dev/null | grep -q "ray.* start --block"; }
is_ours && kill $pid
for _ in \$(seq 600); do is_ours || exit 0; sleep 0.2; done
exit 1
END
            echo "$host: process $pid has ended"
        else
            echo "$host: process $pid is still there after two minutes" >&2
            failed=1
        fi
    done < <(tac "$NOTES/nodes")
    [ "$failed" = 0 ] || exit 1
    rm -f "$NOTES/nodes" "$NOTES/env" "$NOTES/token"
}

case "${1:-}" in
    start) start "${@:2}" ;;
    status) [ $# = 1 ] || fail "status takes no hosts"; status ;;
    stop) [ $# = 1 ] || fail "stop takes no hosts: it ends the cluster of $NOTES"; stop ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit 2 ;;
esac
