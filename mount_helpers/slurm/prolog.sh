#!/bin/sh
# Prolog for slurmd: mounts CacheX FS for the job on this node. Settings: /etc/cachexfs/slurm.conf (slurm.conf.example).
# Exit 0: mounted, or not for this job. Anything else makes Slurm requeue the job and drain the node, which is what a node
# that cannot protect checkpoints deserves.
set -u
phase=prolog
. "$(dirname "$(readlink -f "$0")")/common.sh"
load
case $? in 0) ;; 1) exit 0 ;; *) exit 1 ;; esac
umask 077

if grep -q " $mountpoint fuse.cachex" /proc/self/mounts; then
  [ -d "$run_dir/runtime" ] || { say "$mountpoint belongs to another job: put %j into CACHEXFS_SLURM_MOUNTPOINT"; exit 1; }
  # A requeued job, or a second prolog: a live mount stays, a dead one is replaced below.
  as_user timeout 30 "$CACHEXFS_SLURM_COMMAND" status -- "$mountpoint" </dev/null >/dev/null 2>&1
  [ $? = 4 ] || { say "$mountpoint is mounted already"; exit 0; }
fi

mkdir -p "$mountpoint" "$run_dir/runtime" || exit 1
# From the site's key and the job's id: all nodes of the job have it, no other job does.
"$CACHEXFS_SLURM_COMMAND" job-secret --key "$CACHEXFS_SLURM_SITE_KEY" -- "$job" >"$secret" || exit 1
[ -z "$nvme" ] || mkdir -p "$nvme" || exit 1
if [ "$user" != root ]; then
  chmod 711 "$CACHEXFS_SLURM_RUN" "$run_dir"
  [ -z "$nvme" ] || chmod 711 "$(dirname "$nvme")"
  chown "$user" "$run_dir/runtime" "$secret" ${nvme:+"$nvme"} || exit 1
  # fusermount3 mounts only where the user may write; root's mount point refuses the user's writes when it is bare.
  [ "$CACHEXFS_SLURM_AS_ROOT" = yes ] || chown "$user" "$mountpoint" || exit 1
fi

set --
case $nodes in *,* | *\[*) set -- CACHEXFS_NODES="$nodes" CACHEXFS_SECRET="$secret" ;; esac
[ -z "$node" ] || set -- "$@" CACHEXFS_NODE="$node"
[ -z "$nvme" ] || set -- "$@" CACHEXFS_NVME="$nvme"
options=job=slurm-$job${CACHEXFS_SLURM_OPTIONS:+,$CACHEXFS_SLURM_OPTIONS}

umask 022
# Root mounts and the daemon is the user's: passthrough (the speed of memory) needs root at the mount.
mounter=as_user
if [ "$user" != root ] && [ "$CACHEXFS_SLURM_AS_ROOT" = yes ]; then
  mounter=as_root options=$options,user=$user
fi
# A little more than the command's own limit: nothing here may hold slurmd for ever.
if $mounter "$@" timeout -k 10 $((CACHEXFS_SLURM_MOUNT_TIMEOUT + 20)) "$CACHEXFS_SLURM_COMMAND" mount \
    --timeout "$CACHEXFS_SLURM_MOUNT_TIMEOUT" -o "$options" -- "$pfs" "$mountpoint" </dev/null; then
  say "mounted $pfs at $mountpoint"
  exit 0
fi
say "mounting $pfs at $mountpoint failed"
exit 1
