"""`python -m tests.sim OUT [NAME...]` runs the cases of `tests.sim.cases` on the simulated device."""

from __future__ import annotations

import sys

from tests.sim.device import install

install()  # before the project is imported, whose decorators take what torch has then

from tests.sim.cases import main  # noqa: E402

main(sys.argv[1], sys.argv[2:])
