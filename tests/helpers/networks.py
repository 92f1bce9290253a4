"""Whether this machine has what `benchmarks.cluster` measures with."""

from benchmarks.cluster.net import Network, NetworkUnavailable, check_available
from benchmarks.cluster.plan import parse_rate


def work_here():
    """Returns whether there are shaped networks: root alone does not say so."""
    try:
        check_available()
        with Network(1) as network:
            network.shape(parse_rate("100mbit"))
    except NetworkUnavailable:
        return False
    return True
