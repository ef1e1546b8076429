"""What is wrong with a step and what to do about it: pure functions over what other stages found.

In: `StepFacts`. Out: `Finding` records, most valuable first; `check_remedies` compiles what the most valuable ones recommend.
"""

from remat_kit.analysis.findings.check import Measure, check_remedies
from remat_kit.analysis.findings.collect import find_findings
from remat_kit.analysis.findings.facts import StackFacts, StepFacts
from remat_kit.analysis.findings.recompute import same_numbers

__all__ = ["Measure", "StackFacts", "StepFacts", "check_remedies", "find_findings", "same_numbers"]
