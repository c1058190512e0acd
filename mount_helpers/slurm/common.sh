# Sourced by prolog.sh and epilog.sh: settings, names, log, and running a command as the job's user. POSIX sh.
PATH=$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
CACHEXFS_SLURM_PFS= CACHEXFS_SLURM_MOUNTPOINT=/cachex CACHEXFS_SLURM_NVME= CACHEXFS_SLURM_SITE_KEY=/etc/cachexfs/site.key
CACHEXFS_SLURM_RUN=/run/cachexfs-slurm CACHEXFS_SLURM_OPTIONS= CACHEXFS_SLURM_MOUNT_TIMEOUT=60 CACHEXFS_SLURM_DRAIN_TIMEOUT=600 CACHEXFS_SLURM_PARTITIONS=
CACHEXFS_SLURM_KEEP_DAYS=7 CACHEXFS_SLURM_COMMAND=cachexfs CACHEXFS_SLURM_AS_ROOT=yes
settings=${CACHEXFS_SLURM_CONF:-/etc/cachexfs/slurm.conf}

say() {
  echo "cachexfs $phase: job ${SLURM_JOB_ID:-?}: $*" >&2
  logger -t "cachexfs-$phase" "job ${SLURM_JOB_ID:-?}: $*" 2>/dev/null || true
}

# fill TEXT: %u and %j replaced
fill() { printf '%s' "$1" | sed "s/%u/$user/g; s/%j/$job/g"; }

# Sets job, user, node, nodes, pfs, mountpoint, nvme, run_dir, secret. Returns 1 when the job is not ours, 2 when the settings are wrong.
load() {
  [ -e "$settings" ] || [ -L "$settings" ] || { say "no $settings: nothing is mounted"; return 1; }
  [ -f "$settings" ] && [ -r "$settings" ] || { say "cannot read $settings"; return 2; }
  # shellcheck disable=SC1090
  . "$settings"
  job=${SLURM_JOB_ID:-} user=${SLURM_JOB_USER:-} nodes=${SLURM_NODELIST:-${SLURM_JOB_NODELIST:-}} node=${SLURMD_NODENAME:-}
  case $job in '' | *[!0-9]*) say "no SLURM_JOB_ID"; return 2 ;; esac
  [ -n "$user" ] || user=$(getent passwd "${SLURM_JOB_UID:-}" | cut -d: -f1)
  # What goes into a path and a sed expression.
  case $user in '' | *[!A-Za-z0-9._-]*) say "the user '$user' has an unusual name"; return 2 ;; esac
  if [ -n "$CACHEXFS_SLURM_PARTITIONS" ]; then
    case " $CACHEXFS_SLURM_PARTITIONS " in *" ${SLURM_JOB_PARTITION:-} "*) ;; *) return 1 ;; esac
  fi
  [ -n "$CACHEXFS_SLURM_PFS" ] || { say "CACHEXFS_SLURM_PFS is not set in $settings"; return 2; }
  pfs=$(fill "$CACHEXFS_SLURM_PFS") mountpoint=$(fill "$CACHEXFS_SLURM_MOUNTPOINT")
  nvme=${CACHEXFS_SLURM_NVME:+$(fill "$CACHEXFS_SLURM_NVME")/job-$job}
  # One directory for a job on a node (several slurmd of one machine differ in the node's name).
  run_dir=$CACHEXFS_SLURM_RUN/$job-${node:-alone}
  secret=$run_dir/secret
}

as_root() { env CACHEXFS_RUNTIME_DIR="$run_dir/runtime" "$@"; }

# as_user COMMAND...: the daemon and what asks it run as the job's user, so that the PFS sees that user and no other.
as_user() {
  if [ "$user" = root ]; then
    env CACHEXFS_RUNTIME_DIR="$run_dir/runtime" "$@"
  else
    setpriv --reuid "$(id -u "$user")" --regid "$(id -g "$user")" --init-groups \
      env HOME=/ USER="$user" CACHEXFS_RUNTIME_DIR="$run_dir/runtime" "$@"
  fi
}
