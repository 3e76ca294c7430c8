# bash two_nodes.sh RANKS SCRIPT...: torchrun on two nodes with RANKS ranks each; each node has a network of its own, and
# one wire joins them. Without arguments it only tries whether that is allowed here.
set -e
tied="setpriv --pdeathsig TERM"  # [1]
$tied unshare --net sleep infinity & b=$!  # [2]
until [ "$(readlink /proc/$b/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done

ip link add wire type veth peer name wire netns $b  # [3]
for node in 1 2; do
    on=$([ $node = 1 ] || echo nsenter --net --target $b)
    $on ip address add 10.44.0.$node/24 dev wire
    $on ip link set wire mtu 9000 up
    $on ip link set lo up
    $on tc qdisc add dev wire root tbf rate 10gbit burst 64kb latency 1s  # [4]
done
[ $# = 0 ] && exit

export GLOO_SOCKET_IFNAME=wire
meet="--nnodes 2 --master-addr 10.44.0.1 --master-port 29500 --nproc-per-node $1"
shift
$tied torchrun $meet --node-rank 0 "$@" & a=$!  # [5]
$tied $on torchrun $meet --node-rank 1 "$@"
wait $a
