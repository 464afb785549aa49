"""Python imports this when it starts, in programs that tests run. What these import first is no garbage, and
looking for it as often as by default takes a fifth of the time that they take to start. When they end, Python
looks through all of it three times more, half a second where PyTorch is: only where a test is about how a
program ends, which says so by ``TEST_HOW_IT_ENDS``, must it."""

import atexit
import gc
import os

gc.set_threshold(100_000, 20, 100)
if "TEST_HOW_IT_ENDS" not in os.environ:
    atexit.register(gc.freeze)  # the first that is registered runs last
