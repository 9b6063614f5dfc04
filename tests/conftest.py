"""Hypothesis profiles: `ci` repeats itself exactly and is the default; HYPOTHESIS_PROFILE=full looks ten times longer."""

import os

from hypothesis import settings

settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=500, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
