"""The supervisor: a small process that holds a FUSE mount while the daemon behind it comes and goes.

Role: ``python -m cachexfs.supervisor`` opens ``/dev/fuse``, mounts, and passes whole messages between the
kernel and an ordinary pyfuse3 daemon over a SOCK_SEQPACKET pair. When the daemon dies it starts another and
repeats what was unanswered. ``client`` and ``replay`` are the half that runs inside the daemon.
Only the standard library is used, and nothing of the engine.
"""
