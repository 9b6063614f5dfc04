"""Tools to look into a run: bytes and collectives, traffic and memory ahead of time, equal copies and units.

Guarantee: none of them changes a result.
"""

from fsharding.checkpoint.replicas import check_replicas
from fsharding.comm.counters import count_bytes, record_collectives
from fsharding.train.foresight import expected_memory, expected_traffic
from fsharding.train.reshard import explain_reshard
from fsharding.train.state import state_bytes
from fsharding.transforms.compare_units import compare_units

__all__ = [
    "check_replicas", "compare_units", "count_bytes", "expected_memory", "expected_traffic", "explain_reshard",
    "record_collectives", "state_bytes",
]  # fmt: skip
