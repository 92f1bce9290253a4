"""Checks whether `benchmarks.cluster` can measure on this machine."""

from benchmarks.cluster.net import Network, NetworkUnavailable, check_available
from benchmarks.cluster.plan import parse_rate


def work_here():
    """Returns whether networks with a limited rate can be made, for which root is not enough."""
    try:
        check_available()
        with Network(1) as network:
            network.shape(parse_rate("100mbit"))
    except NetworkUnavailable:
        return False
    return True
