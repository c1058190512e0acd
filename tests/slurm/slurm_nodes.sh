#!/bin/bash
# slurm_nodes.sh up|down ROOT     a real Slurm on this machine, as root: munge, slurmctld and NODES (2) slurmd.
#   PROLOG, EPILOG   scripts for slurmd
# Each slurmd has a network namespace (10.78.0.I) and a mount namespace with ROOT/local of its own, so that nodes n1, n2 share
# nothing but the PFS. slurmctld and the commands live in one more namespace ("hub"): no address appears on the machine itself.
#   nsenter --net=/run/netns/$(cat ROOT/tag)hub -- env SLURM_CONF=ROOT/slurm.conf srun ...
# What is started is ended by its recorded pid.
set -u
what=${1:?up or down} ROOT=${2:?a directory}
NODES=${NODES:-2} SUBNET=10.78.0
host=$(hostname)
export PATH=$PATH:/usr/sbin:/sbin SLURM_CONF=$ROOT/slurm.conf

die() { echo "slurm_nodes: $*" >&2; exit 1; }
alive() { [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }
wait_for() { local i; for ((i = 0; i < 1000; i++)); do "$@" >/dev/null 2>&1 && return 0; sleep 0.1; done; return 1; }
in_hub() { nsenter --net="/run/netns/${tag}hub" -- "$@"; }

write_conf() {
  cat <<C
ClusterName=cachex
SlurmctldHost=$host($SUBNET.254)
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket=$ROOT/munge/socket
SlurmUser=root
StateSaveLocation=$ROOT/ctld
SlurmdSpoolDir=$ROOT/spool-%n
SlurmctldPidFile=$ROOT/slurmctld.pid
SlurmdPidFile=$ROOT/slurmd-%n.pid
SlurmctldLogFile=$ROOT/slurmctld.log
SlurmdLogFile=$ROOT/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
PrologFlags=Alloc
PrologEpilogTimeout=300
MpiDefault=none
KillWait=2
${PROLOG:+Prolog=$PROLOG}
${EPILOG:+Epilog=$EPILOG}
C
  for ((i = 1; i <= NODES; i++)); do
    echo "NodeName=n$i NodeHostname=$host NodeAddr=$SUBNET.$i CPUs=$(nproc) Boards=1 SocketsPerBoard=1 CoresPerSocket=$(nproc) ThreadsPerCore=1 RealMemory=100 State=UNKNOWN"
  done
  echo "PartitionName=all Nodes=ALL Default=YES State=UP"
}

network() {
  ip netns add "${tag}hub" || die "cannot make a network namespace"
  ip -n "${tag}hub" link set lo up
  ip -n "${tag}hub" link add br0 type bridge
  ip -n "${tag}hub" addr add $SUBNET.254/24 dev br0
  ip -n "${tag}hub" link set br0 up
  for ((i = 1; i <= NODES; i++)); do
    ip netns add "$tag$i"
    ip -n "${tag}hub" link add "v$i" type veth peer name eth0 netns "$tag$i"
    ip -n "${tag}hub" link set "v$i" master br0 up
    ip -n "$tag$i" addr add $SUBNET.$i/24 dev eth0
    ip -n "$tag$i" link set eth0 up
    ip -n "$tag$i" link set lo up
  done
}

start_munge() {
  mkdir -p "$ROOT/munge"
  head -c 1024 /dev/urandom >"$ROOT/munge/key"
  chmod 400 "$ROOT/munge/key"
  chown -R munge: "$ROOT/munge"
  chmod 755 "$ROOT/munge"
  setpriv --reuid munge --regid munge --init-groups munged --key-file="$ROOT/munge/key" --pid-file="$ROOT/munge/pid" \
    --socket="$ROOT/munge/socket" --log-file="$ROOT/munge/log" --seed-file="$ROOT/munge/seed" || die "munged"
}

# In a node's namespaces. Its copies of other tests' mounts would keep those alive after their umount: away with them.
node() {
  awk '$3 ~ /^fuse.cachex/ {print $2}' /proc/self/mounts | while IFS= read -r point; do umount -l "$point"; done
  mount --bind "$ROOT/hosts" /etc/hosts && mount -t tmpfs local "$ROOT/local" && exec slurmd -f "$SLURM_CONF" -N "$1"
}

idle() { [ "$(in_hub sinfo -h -N -t idle -o %N | sort -u | wc -l)" = "$NODES" ]; }

up() {
  chmod 755 "$ROOT"
  tag=cxs$$-
  echo "$tag" >"$ROOT/tag"
  mkdir -p "$ROOT"/{ctld,local}
  write_conf >"$SLURM_CONF"
  { echo "127.0.0.1 localhost"; for ((i = 1; i <= NODES; i++)); do echo "$SUBNET.$i n$i"; done; echo "$SUBNET.254 $host"; } >"$ROOT/hosts"
  network
  start_munge
  in_hub slurmctld -f "$SLURM_CONF" || die "slurmctld"
  wait_for in_hub scontrol ping || die "slurmctld does not answer: $(tail -3 "$ROOT/slurmctld.log")"
  for ((i = 1; i <= NODES; i++)); do
    mkdir -p "$ROOT/spool-n$i"
    nsenter --net="/run/netns/$tag$i" -- unshare --mount --propagation private "$0" node "$ROOT" "n$i" || die "slurmd n$i"
  done
  wait_for idle || die "nodes are not idle: $(in_hub sinfo -h)"
}

down() {
  tag=$(cat "$ROOT/tag" 2>/dev/null) || return 0
  in_hub scancel --state=RUNNING --user=root 2>/dev/null
  local files=("$ROOT"/slurmd-n*.pid "$ROOT/slurmctld.pid" "$ROOT/munge/pid") pids=() file i
  for file in "${files[@]}"; do alive "$file" && pids+=("$(cat "$file")"); done
  [ ${#pids[@]} = 0 ] || kill "${pids[@]}" 2>/dev/null
  gone() { local pid; for pid in "${pids[@]}"; do ! kill -0 "$pid" 2>/dev/null || return 1; done; }
  wait_for gone || kill -9 "${pids[@]}" 2>/dev/null
  for ((i = 1; i <= NODES; i++)); do ip netns del "$tag$i"; done
  ip netns del "${tag}hub"
  rm -f "$ROOT/tag"
}

case $what in
  up) up ;;
  down) down ;;
  node) node "$3" ;;
  *) sed -n 2,8p "$0"; exit 2 ;;
esac
