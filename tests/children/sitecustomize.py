"""Python imports this when it starts, in programs that tests run: what these import first is no garbage, and
looking for it as often as by default takes a fifth of the time that they take to start."""

import gc

gc.set_threshold(100_000, 20, 100)
