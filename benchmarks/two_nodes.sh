# bash two_nodes.sh RANKS SCRIPT...: run torchrun on two nodes with RANKS ranks each. Each node has a network of its own,
# and one wire joins them. Without arguments it only tries whether that is allowed here.
# Start it as root of a user namespace: unshare --user --map-root-user --net bash two_nodes.sh ...
set -e
tied="setpriv --pdeathsig TERM"  # ends what it starts when this script ends, however that happens
$tied unshare --net sleep infinity & b=$!  # the first network is this script's own; this process holds the second
until [ "$(readlink /proc/$b/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done

ip link add wire type veth peer name wire netns $b  # a virtual cable with one end in each network, both called `wire`
for node in 1 2; do
    on=$([ $node = 1 ] || echo nsenter --net --target $b)
    $on ip address add 10.44.0.$node/24 dev wire
    $on ip link set wire mtu 9000 up  # packets of 9,000 bytes, as in many data centers
    $on ip link set lo up
    $on tc qdisc add dev wire root tbf rate 10gbit burst 64kb latency 1s  # a token bucket limits what each end sends
done
[ $# = 0 ] && exit

export GLOO_SOCKET_IFNAME=wire
meet="--nnodes 2 --master-addr 10.44.0.1 --master-port 29500 --nproc-per-node $1"
shift
$tied torchrun $meet --node-rank 0 "$@" & a=$!
$tied $on torchrun $meet --node-rank 1 "$@"  # $on is still "on node 2", from the loop's last turn
wait $a
