#!/usr/bin/env bash
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

Remote hosts run in this folder's path. The workshop and its Python must be at the same paths on all of them, ssh must
work without a password, and every NAME must lead to its host from every other one. The Python is $PYTHON, by default
the workshop's .venv/bin/python if there is one, else python3. Handed on to remote hosts from the environment: PET_*,
NCCL_*, GLOO_*, TORCH_*, FI_*, UCX_*, LD_LIBRARY_PATH, CUDA_VISIBLE_DEVICES, OMP_NUM_THREADS. A remote host is named
once: for more processes there use --nproc-per-node. Nodes on localhost share this machine: they get OMP_NUM_THREADS=1
unless it is set, and each its own GPUs, or none where these are fewer than the processes. torchrun reads its other
options from PET_*: for its --max-restarts 2 set PET_MAX_RESTARTS=2.

Every line of output begins with its node, numbered as you listed them. torchrun numbers nodes by itself (GROUP_RANK),
in the order of their addresses as text; rank 0, which writes checkpoints and metrics, is on the first of those (on
localhost: node 0).
A node that fails ends the others, and its exit code is this one's; torchrun's is 1, whatever the script's was.
Ctrl-C and SIGTERM end all processes on all hosts (exit code 130, 143). When a connection drops, ssh notices within a
minute and the other nodes end; the ranks on the lost host end when they miss the others, its agent minutes later.
Exit code 2: wrong usage, or a host that is not ready.
EOF
}

fail() {
    echo "launch_multinode_ddp.sh: error: $*" >&2
    exit 2
}

quote() { # the words as one line that a shell reads back as the same words
    local word words=()
    for word; do
        [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word=${word@Q}
        words+=("$word")
    done
    echo "${words[*]}"
}

# [1] Read the command line.
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || fail "bash $BASH_VERSION is too old: 4.4 or newer is needed"
hosts=() nproc=1 port='' dry_run=''
while (($#)); do
    case $1 in
        -h | --help) manual && exit ;;
        --dry-run) dry_run=yes ;;
        --nproc-per-node | --port | --hostfile) [[ $# -gt 1 && $2 != -- ]] || fail "$1 needs a value" ;;&
        --nproc-per-node) nproc=$2 && shift ;;
        --port) port=$2 && shift ;;
        --hostfile)
            [[ -f $2 && -r $2 ]] || fail "cannot read the hostfile $2"
            ! LC_ALL=C grep -q $'[\xfe\xff]' "$2" || fail "the hostfile $2 is not UTF-8: save it as UTF-8" # UTF-16?
            mapfile -t lines <"$2" && shift
            lines[0]=${lines[0]-} && lines[0]=${lines[0]#$'\xef\xbb\xbf'} # a byte order mark
            for line in "${lines[@]%%#*}"; do
                read -ra words <<<"${line%$'\r'}"
                hosts+=("${words[@]}")
            done
            ;;
        --) break ;;
        -*) fail "unknown option $1 (--help lists them; options of train_ddp.py go behind --)" ;;
        *) hosts+=("$1") ;;
    esac
    shift
done
arguments=("${@:2}")
((${#hosts[@]})) || fail "no host: name at least one, for instance \`localhost localhost\` (--help shows more)"
((${#arguments[@]})) || fail "no options for train_ddp.py: give at least one behind --, for instance -- --epochs 5"
[[ $nproc =~ ^([1-9][0-9]{0,3}|gpu)$ ]] || fail "--nproc-per-node $nproc: a number above 0, or gpu"
[[ -z $port || ($port =~ ^[1-9][0-9]{0,4}$ && $port -le 65535) ]] || fail "--port $port: a number from 1 to 65535"
num_local=0 names=' '
for host in "${hosts[@]}"; do
    [[ $host =~ ^[A-Za-z0-9_.][A-Za-z0-9_.@-]*$ ]] || fail "$host is no host name"
    [[ $host != localhost ]] || { ((num_local += 1)) && continue; }
    [[ $names != *" ${host##*@} "* ]] ||
        fail "${host##*@} is named twice, and two nodes would share its GPUs: name it once, with more --nproc-per-node"
    names+="${host##*@} "
done
((num_local == 0 || num_local == ${#hosts[@]})) ||
    fail "localhost is another machine on each host: call this one by the name that the others know"

# [2] The command of each node.
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
script=$repository/01-ddp-pytorch-only/train_ddp.py
[[ -n ${PYTHON:-} ]] || { PYTHON=$repository/.venv/bin/python && [[ -x $PYTHON ]]; } || PYTHON=python3
launch_id=launch-$(date +%Y%m%d-%H%M%S)-$$
ssh_options=(-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -o LogLevel=ERROR)
first=${hosts[0]##*@} variables=() gpus=() command=() addresses=("${hosts[@]##*@}")
if ((num_local)); then
    first=127.0.0.1
    "$PYTHON" -c '' 2>/dev/null || fail "PYTHON=$PYTHON does not run"
    # Below the ports that Linux hands out to whoever wants any, lest it is another's a moment later.
    bind='import random, socket, sys
for port in sys.argv[1:] or random.sample(range(20_000, 29_000), 100):
    try:
        socket.create_server(("", int(port))).close()
    except OSError:
        continue
    sys.exit(print(port))
sys.exit(1)'
    free_port=$("$PYTHON" -c "$bind" ${port:+"$port"} 2>/dev/null) || fail "port $port is in use on this machine"
    port=$free_port
    if ((num_local > 1)); then # they share the machine
        [[ $nproc != gpu ]] || fail "--nproc-per-node gpu: nodes that share a machine need a number"
        variables=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}")
        all_gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, -)
        IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES-$all_gpus}"
    fi
else
    for name in $(compgen -e); do
        [[ ! $name =~ ^((PET|NCCL|GLOO|TORCH|FI|UCX)_|(LD_LIBRARY_PATH|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS)$) ]] ||
            variables+=("$name=${!name}")
    done
fi

compose() { # compose NUMBER: set `command` to that node's
    local host=${hosts[$1]} address=${addresses[$1]} own=("${variables[@]}")
    # Agents number themselves by their addresses as text, and only the first one's is ever used: 127... < localhost.
    [[ $host != localhost || $1 != 0 ]] || address=$first
    if ((${#gpus[@]})); then
        ((${#gpus[@]} >= num_local * nproc)) || gpus=('') # fewer than ranks: the CPU
        own+=("CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${gpus[*]:$1*nproc:nproc}")")
    fi
    ((${#own[@]} == 0)) || own=(env "${own[@]}")
    # Left alone, torchrun decides by its host name whether it is the meeting point, and may be wrong (is_host), and
    # tells the others that name instead of the one they know (--local-addr).
    command=("${own[@]}" "$PYTHON" -m torch.distributed.run --nnodes "${#hosts[@]}" --nproc-per-node "$nproc"
        --rdzv-id "$launch_id" --rdzv-backend c10d --rdzv-endpoint "$first:${port:-29500}"
        --rdzv-conf "is_host=$(($1 == 0))${PET_RDZV_CONF:+,$PET_RDZV_CONF}" --local-addr "$address"
        "$script" "${arguments[@]}")
    # A terminal (-tt) over there takes its processes with it when the connection ends.
    [[ $host == localhost ]] ||
        command=(ssh -tt "${ssh_options[@]}" "$host" "cd $(quote "$PWD") && exec $(quote "${command[@]}")")
}

for number in "${!hosts[@]}"; do
    [[ -n $dry_run ]] || break
    compose "$number"
    echo "# node $number, ${hosts[number]}"
    quote "${command[@]}"
done
[[ -z $dry_run ]] || exit 0

# [3] Find now what would make the nodes wait for each other in vain. And ask each host for the addresses of the others:
# its own name may lead a host to itself only (127.0.1.1), and gloo finds its interface by the first node's address.
resolve=$(quote "$PYTHON" -c 'import socket, sys
socket.getaddrinfo(sys.argv[1], None)
for name in sys.argv[1:]:
    try:
        print(min(socket.getaddrinfo(name, None))[4][0])
    except OSError:
        print(name)' "${addresses[@]}")
for number in "${!hosts[@]}"; do
    host=${hosts[number]}
    [[ $host == localhost ]] ||
        answer=$(ssh -n "${ssh_options[@]}" "$host" \
            "cd $(quote "$PWD") && ls $(quote "$script") >/dev/null && $resolve" 2>&1) ||
        fail "$host is not ready: ${answer##*$'\n'}"
    [[ $host == localhost ]] || mapfile -t answers <<<"$answer"
    for other in "${!hosts[@]}"; do
        [[ $host == localhost || $other == "$number" ]] || addresses[other]=${answers[-${#hosts[@]} + other]}
    done
done

# [4] Start all nodes, each in a process group of its own; the first that fails ends the others.
run_node() { # run_node NUMBER HOST: each line of its output behind its name; ends with its exit code
    local line code=137 end="$launch_id ended with exit code "
    trap : TERM # the shells outlive the signal, to show the last words of the processes that end by it
    {
        local status=0
        compose "$1"
        if [[ $2 == localhost ]]; then
            trap : TERM
            "${command[@]}" </dev/null &
        else
            exec {keyboard}> >(trap '' TERM && exec "${command[@]}")
            trap 'printf "\003" >&"$keyboard"' TERM # Ctrl-C in the terminal over there
        fi
        wait $! || status=$?
        while kill -0 $!; do wait $! || status=$?; done 2>/dev/null
        echo "$end$status"
    } 2>&1 | {
        trap '' TERM
        # Not to the end of file: ranks whose agent was killed may hold the pipe open.
        while IFS= read -r line && [[ $line != *"$end"* ]]; do
            echo "[node $1 $2] ${line%$'\r'}"
        done
        [[ $line != *"$end"* ]] || { code=${line##*"$end"} && line=${line%%"$end"*}; }
        [[ -z $line ]] || echo "[node $1 $2] $line"
        ((code == 0)) || echo "[node $1 $2] ended with exit code $code"
        exit "$code"
    }
}

stop() { # end every process of this launch, on every host
    trap '' INT TERM HUP
    local group host tenths
    for group in $(jobs -p); do kill -TERM -- "-$group"; done
    for ((tenths = 0; tenths < 100; tenths++)); do
        [[ -n $(jobs -pr) ]] || break
        sleep 0.1
    done
    for group in $(jobs -p); do kill -KILL -- "-$group"; done
    # Ranks whose agent was killed have no parent any more; torchrun has put our id into their environment.
    local sweep=("$PYTHON" -c 'import psutil, sys
for process in psutil.process_iter(["environ"]):
    if (process.info["environ"] or {}).get("TORCHELASTIC_RUN_ID") == sys.argv[1]:
        process.kill()' "$launch_id")
    for host in $(printf '%s\n' "${hosts[@]}" | sort -u); do
        if [[ $host == localhost ]]; then "${sweep[@]}"; else ssh -n "${ssh_options[@]}" "$host" "$(quote "${sweep[@]}")"; fi
    done
    wait
} 2>/dev/null

trap 'stop; exit 129' HUP
trap 'stop; exit 130' INT
trap 'stop; exit 143' TERM
set -m # each background job is a process group, and Ctrl-C reaches this script alone
for number in "${!hosts[@]}"; do
    run_node "$number" "${hosts[number]}" &
done
for number in "${!hosts[@]}"; do
    wait -n || { code=$? && stop; exit "$code"; }
done
