"""Says what is wrong with a run, and what to set: `lagrpo diagnose` and `lagrpo.diagnose`.

A detector is a pure function of what the run recorded; table.py lists all of them with their
thresholds. docs/diagnose.md says how to add one.
"""

from lagrpo.diagnosis.diagnose import Diagnosis, diagnose
from lagrpo.diagnosis.finding import Detector, Finding, Place
from lagrpo.diagnosis.record import RunRecord

__all__ = ["Detector", "Diagnosis", "Finding", "Place", "RunRecord", "diagnose"]
