"""What all nodes of a job must have in common, and the words for a node that has not.

Role: pure; the rule for the job's record, used by the daemon when it registers its node.
"""

from __future__ import annotations

import msgspec

from cachexfs.core.records import FORMAT_VERSION, ROOT_FID, Job
from cachexfs.errors import UsageError


def agree(job: Job | None, name: str, node: str, replicas: int, pfs: str, pfs_id: str) -> Job:
    """The record of the job ``name`` with a node in it, which has mounted ``pfs``.

    ``pfs_id`` is the identity of that directory, "" if it was not asked (offline). Raises ``UsageError`` when
    this node was mounted otherwise than the others: files would land in two places.
    """
    if job is None:
        return Job(FORMAT_VERSION, ROOT_FID, node, replicas, pfs_id, pfs if pfs_id else "")
    if job.replicas != replicas:
        raise UsageError(f"the job's other nodes keep {job.replicas} replicas: use -o replicas={job.replicas}")
    if not job.pfs_id:
        return msgspec.structs.replace(job, pfs_id=pfs_id, pfs=pfs) if pfs_id else job
    if pfs_id not in ("", job.pfs_id):
        same = " (of that name there: is the same filesystem mounted here?)" if pfs == job.pfs else ""
        raise UsageError(
            f"the PFS directory {pfs} of node {node} (.cachexfs/id {pfs_id}) is not the one that the "
            f"other nodes of job {name} have mounted, {job.pfs}{same} (.cachexfs/id {job.pfs_id}): all nodes of "
            "a job need the same; mount that one, or give this mount another job name (-o job=NAME)"
        )
    return job
