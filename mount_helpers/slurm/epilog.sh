#!/bin/sh
# Epilog for slurmd: brings what is left to the PFS, within CACHEXFS_SLURM_DRAIN_TIMEOUT, and unmounts. Always exits 0 (a
# failing epilog drains the node): what did not reach the PFS stays on the nodes' NVMe, recoverable, and is named in the log.
set -u
phase=epilog
. "$(dirname "$(readlink -f "$0")")/common.sh"
load || exit 0
grep -q " $mountpoint fuse.cachex" /proc/self/mounts || exit 0

said=$(as_user timeout -k 10 $((CACHEXFS_SLURM_DRAIN_TIMEOUT + 60)) "$CACHEXFS_SLURM_COMMAND" umount \
  --timeout "$CACHEXFS_SLURM_DRAIN_TIMEOUT" -- "$mountpoint" </dev/null 2>&1)
status=$?
said=$(printf '%s\n' "$said" | tail -n 1) # before it stand lines on what it waited for
kept="on this node (staging below $run_dir${nvme:+, replicas in $nvme})"
case $status in
  0)
    # Everything is on the PFS: a staging that is still in use by an ending process may go.
    awk -v below="$run_dir/" 'index($2, below) == 1 {print $2}' /proc/self/mounts |
      while IFS= read -r staging; do umount -l "$staging"; done
    rm -rf --one-file-system -- "$run_dir"
    rmdir "$mountpoint" 2>/dev/null # so that nothing is written into a bare directory
    # Another node may have failed to drain what has its second copy here: keep it for a while.
    # (The mark is not in the job's directory: that is the user's, and may hold a link to anywhere.)
    [ -z "$nvme" ] || : >"$(dirname "$nvme")/drained-$job"
    say "everything is on the PFS, $mountpoint is unmounted" ;;
  3) say "NOT EVERYTHING IS ON THE PFS; it stays $kept: $said" ;;
  *)
    say "cannot drain (exit $status), what is left stays $kept: $said"
    as_user timeout 60 "$CACHEXFS_SLURM_COMMAND" umount --abandon -- "$mountpoint" </dev/null >/dev/null 2>&1 || true
    grep -q " $mountpoint fuse.cachex" /proc/self/mounts && umount -l "$mountpoint" ;;
esac
if [ -n "$nvme" ] && [ "$CACHEXFS_SLURM_KEEP_DAYS" -gt 0 ]; then
  find "$(dirname "$nvme")" -maxdepth 1 -name 'drained-*' -mmin +$((CACHEXFS_SLURM_KEEP_DAYS * 1440)) |
    while IFS= read -r mark; do rm -rf -- "${mark%/*}/job-${mark##*/drained-}" "$mark"; done
fi
exit 0
