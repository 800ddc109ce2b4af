"""What every test shares."""

import os

from hypothesis import settings

# No deadline: a test says nothing about time. CI has the same examples every time, others new ones.
settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("project")
