"""Classes of the results of this package's functions, for type annotations."""

from jaxcomp._adviser.advise import Advice, Prediction
from jaxcomp._adviser.measure import Calibration
from jaxcomp._base.stats import CompressionStats, LeafStats
from jaxcomp._bytes.gap import Gap, Law
from jaxcomp._local.local_sgd_round import LocalSGDRound
from jaxcomp._local.sync import LocalSGDState
from jaxcomp._reducers.error_feedback import ErrorFeedbackState
from jaxcomp._reducers.transformation import Transformation
from jaxcomp._states.diagnostics import Diagnostics, LeafDiagnostics
from jaxcomp._training.data_parallel import DataParallel
from jaxcomp._wire.collectives import Collective, Collectives

__all__ = [
    "Advice",
    "Calibration",
    "Collective",
    "Collectives",
    "CompressionStats",
    "DataParallel",
    "Diagnostics",
    "ErrorFeedbackState",
    "Gap",
    "Law",
    "LeafDiagnostics",
    "LeafStats",
    "LocalSGDRound",
    "LocalSGDState",
    "Prediction",
    "Transformation",
]
