#!/usr/bin/env bash
# One torchrun agent on every node, together running train_ddp.py. The manual: launch_multinode_ddp.sh --help
set -u

manual() {
    cat <<'EOF'
Usage: launch_multinode_ddp.sh HOST... [--nproc-per-node N] [--port P] [--hostfile FILE] [--dry-run] -- ARGS...

Starts one torchrun agent on each HOST; together they run `train_ddp.py ARGS...` in N processes a host.

  ./launch_multinode_ddp.sh localhost localhost -- --epochs 2            two "nodes" on this machine
  ./launch_multinode_ddp.sh gpu-1 gpu-2 --nproc-per-node 8 -- --epochs 5 --storage-path /shared/runs

  HOST                  `localhost`, as often as you want nodes on this machine, or names that ssh knows ([USER@]NAME)
  --hostfile FILE       more hosts, one a line; `#` starts a comment
  --nproc-per-node N    processes a host (default: 1), or `gpu`: as many as it has GPUs
  --port P              where the agents meet, on the first host (default: 29500; on localhost a free one)
  --dry-run             print each node's command, exactly as it would run, and start nothing
  PYTHON=...            the interpreter (default: the workshop's .venv/bin/python if there is one, else python3)

Remote hosts run in the same folder as this one: the workshop and its Python must be at the same paths everywhere, ssh
must work without a password, and NAME must lead to the host from every host. PET_*, NCCL_*, GLOO_*, TORCH_*,
CUDA_VISIBLE_DEVICES and OMP_NUM_THREADS are handed on to them. torchrun reads its other options from PET_*: for
--max-restarts 2 set PET_MAX_RESTARTS=2. Nodes that share a machine get OMP_NUM_THREADS=1 unless it is set.

Every line of output says which node it is from, counted as in the list. torchrun itself numbers the nodes (GROUP_RANK)
in the order of their names as text, and rank 0, which writes checkpoints and metrics, is on the first of those.
A node that fails ends all others. The exit code is then that node's: torchrun ends with 1, whatever code the script had.
Ctrl-C or SIGTERM ends all processes on all hosts (exit code 130 or 143). Where a connection drops, ssh gives up after
45 s and the other nodes end; what runs on the lost host ends when it misses them. Exit code 2: wrong usage.
EOF
}

fail() {
    echo "launch_multinode_ddp.sh: error: $*" >&2
    exit 2
}

# [1] Read the command line.
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || fail "bash $BASH_VERSION is too old: 4.4 or newer is needed"
hosts=() nproc=1 port='' dry_run='' separator=''
while (($#)); do
    case $1 in
        -h | --help) manual; exit 0 ;;
        --dry-run) dry_run=yes; shift; continue ;;
        --) separator=yes; shift; break ;;
        --nproc-per-node | --port | --hostfile) [[ $# -gt 1 && $2 != -- ]] || fail "$1 needs a value" ;;
        -*) fail "unknown option $1 (--help lists them; options of train_ddp.py go behind --)" ;;
        *) hosts+=("$1"); shift; continue ;;
    esac
    case $1 in
        --nproc-per-node) nproc=$2 ;;
        --port) port=$2 ;;
        --hostfile)
            [[ -f $2 && -r $2 ]] || fail "cannot read the hostfile $2"
            while IFS=$' \t\r' read -r line || [[ -n $line ]]; do
                line=${line%%#*}
                read -r line <<<"${line//$'\r'/}" # without the blanks around it
                [[ -z $line ]] || hosts+=("$line")
            done <"$2"
            ;;
    esac
    shift 2
done
((${#hosts[@]})) || fail "no host: name at least one, for instance \`localhost localhost\` (--help shows more)"
[[ -n $separator && $# -gt 0 ]] || fail "no options for train_ddp.py: give at least one behind --, for instance -- --epochs 5"
[[ $nproc =~ ^([1-9][0-9]{0,3}|gpu)$ ]] || fail "--nproc-per-node $nproc: a number above 0, or gpu"
[[ -z $port || ($port =~ ^[1-9][0-9]{0,4}$ && $port -le 65535) ]] || fail "--port $port: a number from 1 to 65535"
num_local=0
for host in "${hosts[@]}"; do
    [[ $host =~ ^[A-Za-z0-9_.][A-Za-z0-9_.@-]*$ ]] || fail "\"$host\" is no host name"
    [[ $host != localhost ]] || ((num_local += 1))
done
((num_local == 0 || num_local == ${#hosts[@]})) ||
    fail "localhost means another machine on every host: name this one as the others know it"

# [2] The command of every node: the same but for --local-addr.
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
script=$repository/01-ddp-pytorch-only/train_ddp.py
[[ -n ${PYTHON:-} ]] || { PYTHON=$repository/.venv/bin/python && [[ -x $PYTHON ]]; } || PYTHON=python3
environment=() first=${hosts[0]##*@}
if ((num_local)); then
    first=127.0.0.1
    "$PYTHON" -c '' 2>/dev/null || fail "PYTHON=$PYTHON does not run"
    bind='import socket, sys
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("", int(sys.argv[1])))
print(server.getsockname()[1])'
    free_port=$("$PYTHON" -c "$bind" "${port:-0}" 2>/dev/null) || fail "port $port is in use on this machine; try another"
    port=$free_port
    ((num_local == 1)) || environment=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}")
else
    while read -r name; do
        [[ $name =~ ^(PET_|NCCL_|GLOO_|TORCH_|OMP_NUM_THREADS$|CUDA_VISIBLE_DEVICES$) ]] && environment+=("$name=${!name}")
    done < <(compgen -e)
fi
((${#environment[@]} == 0)) || environment=(env "${environment[@]}")
launch_id=launch-$(date +%Y%m%d-%H%M%S)-$$
ssh_options=(-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -o ServerAliveCountMax=3)

quote() { # the words as one line that a shell reads back as the same words
    local word words=()
    for word; do
        [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] && words+=("$word") || words+=("${word@Q}")
    done
    echo "${words[*]}"
}

compose() { # compose NUMBER: the command of that node, as the array `command`
    local host=${hosts[$1]} address=${hosts[$1]##*@}
    [[ $host != localhost ]] || address=$first
    # torchrun tells a node from its host name whether it is the meeting point, and often errs: we know it.
    command=("${environment[@]}" "$PYTHON" -m torch.distributed.run --nnodes "${#hosts[@]}" --nproc-per-node "$nproc"
        --rdzv-id "$launch_id" --rdzv-backend c10d --rdzv-endpoint "$first:${port:-29500}"
        --rdzv-conf "is_host=$(($1 == 0))${PET_RDZV_CONF:+,$PET_RDZV_CONF}" --local-addr "$address"
        "$script" "${arguments[@]}")
    # A terminal (-tt) on the other side, so that the processes there end with the connection.
    [[ $host == localhost ]] || command=(ssh -tt "${ssh_options[@]}" "$host" "cd $(quote "$PWD") && exec $(quote "${command[@]}")")
}

arguments=("$@")
if [[ -n $dry_run ]]; then
    for index in "${!hosts[@]}"; do
        compose "$index"
        echo "# node $index, ${hosts[index]}"
        quote "${command[@]}"
    done
    exit 0
fi

# [3] Find now what would make the nodes wait for each other in vain.
for host in "${hosts[@]}"; do
    [[ $host != localhost ]] || continue
    resolve=("$PYTHON" -c 'import socket, sys; socket.getaddrinfo(sys.argv[1], None)' "$first")
    problem=$(ssh -n "${ssh_options[@]}" "$host" \
        "cd $(quote "$PWD") && ls $(quote "$script") >/dev/null && $(quote "${resolve[@]}")" 2>&1) ||
        fail "$host is not ready: ${problem##*$'\n'}"
done

# [4] Start all nodes, each in a process group of its own; the first that fails ends the others.
run_node() { # run_node NUMBER HOST: every line of its output behind its name; its exit code
    local code=0 line end="$launch_id ended with exit code "
    trap : TERM # all of this outlives the signal, to show the last words of the processes that end by it
    {
        compose "$1"
        if [[ $2 == localhost ]]; then
            trap : TERM
            "${command[@]}" </dev/null &
        else
            exec {keyboard}> >(trap '' TERM && exec "${command[@]}")
            trap 'printf "\003" >&"$keyboard"' TERM # Ctrl-C in the terminal on the other side
        fi
        wait $! || code=$?
        while kill -0 $! 2>/dev/null; do wait $! || code=$?; done
        echo "$end$code"
    } 2>&1 | {
        trap '' TERM
        while IFS= read -r line && [[ $line != *"$end"* ]]; do
            echo "[node $1 $2] ${line%$'\r'}"
        done
        code=${line##*"$end"} line=${line%%"$end"*}
        [[ -z $line ]] || echo "[node $1 $2] $line"
        ((code == 0)) || echo "[node $1 $2] ended with exit code $code"
        exit "$code"
    }
}

stop() { # end every process of this launch, on every host
    trap '' INT TERM HUP
    local group host tenths
    for group in $(jobs -p); do kill -TERM -- "-$group" 2>/dev/null; done
    for ((tenths = 0; tenths < 100; tenths++)); do
        [[ -n $(jobs -pr) ]] || break
        sleep 0.1
    done
    for group in $(jobs -p); do kill -KILL -- "-$group" 2>/dev/null; done
    # Ranks whose agent was killed have no parent any more: find them by what torchrun has put into their environment.
    local sweep=("$PYTHON" -c 'import psutil, sys
for process in psutil.process_iter(["environ"]):
    if (process.info["environ"] or {}).get("TORCHELASTIC_RUN_ID") == sys.argv[1]:
        process.kill()' "$launch_id")
    for host in $(printf '%s\n' "${hosts[@]}" | sort -u); do
        if [[ $host == localhost ]]; then "${sweep[@]}"; else ssh -n "${ssh_options[@]}" "$host" "$(quote "${sweep[@]}")"; fi
    done 2>/dev/null
    wait
} 2>/dev/null

trap 'stop; exit 129' HUP
trap 'stop; exit 130' INT
trap 'stop; exit 143' TERM
set -m # every background job is a process group, and Ctrl-C reaches this script alone
for index in "${!hosts[@]}"; do
    run_node "$index" "${hosts[index]}" &
done
for index in "${!hosts[@]}"; do
    wait -n || { code=$?; stop; exit "$code"; }
done
