"""What ``cachexfs mount --help`` says of the mount options: a line each, for who has no manual at hand.

Role: text alone; ``docs/options.md`` and ``cachexfs-mount(1)`` have the details. A test compares the names.
"""

from __future__ import annotations

MEANINGS = {
    "memory": "staging size, as 64G or 25% (of what cgroup or machine allow; default)",
    "staging": "directory for staging, on tmpfs",
    "nvme": "directory on this node's own disk, for others' replicas; needed with nodes=",
    "prefault": "memory made ready while nothing is written; off, or a size",
    "nice": "priority of the processes that applications wait for, as in nice(1)",
    "spill": "where staged files go when memory is full: auto, off, or a directory",
    "nodes": "the job's nodes: n[1-4,7], a;b;c, or @FILE; the same on all",
    "node": "which of them this is (default: by name or address)",
    "job": "separates this job from others (default: the launcher's job id)",
    "domains": "file of failure domains, NODE DOMAIN a line",
    "replicas": "partner copies (1)",
    "listen": "[ADDRESS][:PORT] to listen on",
    "secret": "file with the job's shared secret, mode 0600; needed with nodes=",
    "catalogue": "auto, or HOST:PORT;... of the site's etcd",
    "node_timeout": "silence after which a node counts as lost (10s)",
    "fsync": "what fsync(2) waits for: returned, partner, pfs (partner; alone: pfs)",
    "route": "partner, direct or auto",
    "drain_workers": "processes that copy to the PFS (4)",
    "drain_bandwidth": "limit of that copy, as 500M (bytes a second), or none",
    "keep_fast": "checkpoints kept in memory and NVMe once they are on the PFS (2)",
    "full_timeout": "how long a write waits for room before ENOSPC (45s)",
    "fsync_timeout": "how long fsync(2) waits for its boundary before EIO (45s)",
    "offline": "run without the PFS",
    "pfs_type": "refuse a PFS_DIR that is on no such filesystem: lustre, nfs, ..., mount (any)",
    "verify": "read back what was copied to the PFS and compare",
    "hide_xattrs": "attributes can be read by name and are not listed",
    "passthrough": "auto, on, off: the kernel writes to staging itself",
    "supervisor": "auto, on, off: the mount outlives its daemon",
    "user": "as root: mount for this user",
    "allow_other": "other users may use the mount",
    "log_file": "where the daemon logs",
    "log_level": "debug, info, warning or error",
    "runtime_dir": "where the mount is registered",
}

EPILOG = "\b\nOptions (-o); details in cachexfs-mount(1) and docs/options.md:\n" + "\n".join(
    f"  {name:<15} {meaning}" for name, meaning in MEANINGS.items()
)
