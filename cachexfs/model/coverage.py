"""Coverage: what the partner copy does not survive.

Role: kappa, the share of failures that need the PFS copy, and the loss of pairs. Pure; docs/model.md section 7.
"""

from __future__ import annotations

import math

from cachexfs.errors import UsageError


def uncovered_share(
    single_per_s: float,
    shared_per_s: float,
    system_per_s: float,
    common_cause: float,
    node_failures_per_s: float,
    reprotect_s: float,
    nvme_survives: float,
) -> float:
    """kappa: share of failures that the partner copy does not cover.

    Rates [1/s] of failures of one node, of a shared domain (node and partner together) and of the whole
    system; ``common_cause`` is the beta factor (Fleming 1975): chance that what killed the node also kills its
    partner; ``reprotect_s`` until a new second copy exists; ``nvme_survives`` chance that node-local data can
    be read after a system outage.
    """
    total = single_per_s + shared_per_s + system_per_s
    if not (total > 0.0 and min(single_per_s, shared_per_s, system_per_s, node_failures_per_s) >= 0.0):
        raise UsageError("failure rates must not be negative, and one must be positive")
    if not (0.0 <= common_cause <= 1.0 and 0.0 <= nvme_survives <= 1.0 and reprotect_s >= 0.0):
        raise UsageError("common_cause and nvme_survives lie in [0, 1], reprotect_s is not negative")
    both = common_cause + (1 - common_cause) * -math.expm1(-node_failures_per_s * reprotect_s)
    return (single_per_s * both + shared_per_s + system_per_s * (1 - nvme_survives)) / total


def pair_loss(nodes: int, lost: int, ring: bool = False) -> float:
    """Chance that ``lost`` simultaneous node losses of ``nodes`` take some node and its partner.

    Disjoint pairs, exactly: 1 - C(n/2, k) 2^k / C(n, k). Neighbour ring, exactly: no two of k chosen nodes
    are neighbours in n / (n - k) C(n - k, k) of C(n, k) ways.
    """
    if nodes < 2 or not 0 <= lost <= nodes or (not ring and nodes % 2):
        raise UsageError("pairs need an even number of nodes, 2 or more, and at most that many lost")
    if lost < 2:
        return 0.0
    log_c = _log_choose
    if ring:
        if 2 * lost > nodes:
            return 1.0
        log_safe = math.log(nodes / (nodes - lost)) + log_c(nodes - lost, lost) - log_c(nodes, lost)
    else:
        if lost > nodes // 2:
            return 1.0
        log_safe = log_c(nodes // 2, lost) + lost * math.log(2.0) - log_c(nodes, lost)
    return -math.expm1(min(log_safe, 0.0))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
