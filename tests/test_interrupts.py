"""Ctrl-C in the middle of reads: the interrupt comes through, `out` is left alone afterwards, the reader
stays usable."""

from __future__ import annotations

import subprocess
import sys

import featstore

#: An event would not do: interrupted in ``set``, it keeps its lock.
PROGRAM = """
import faulthandler, random, signal, sys, threading, time
faulthandler.dump_traceback_later(75, exit=True)
import numpy as np, featstore
store = featstore.open(sys.argv[1])
features = np.load(sys.argv[3])
if sys.argv[2] == "buffer":
    reader = store.reader(memory="8MiB", tiers=[featstore.Buffer("s3-fifo", "1MiB")])
else:
    reader = store.reader(memory="2MiB", engine=sys.argv[2], static=None)
ids = np.random.default_rng(0).integers(0, len(features), 20_000)
wanted = features[ids]
for some in (200, len(ids)):  # once before: what is interrupted is reading, not Numba
    assert np.array_equal(reader.read(ids[:some]), wanted[:some])
stop = begun = False
def bother():
    while not begun:
        time.sleep(0.001)
    while not stop:
        time.sleep(random.uniform(0.0005, 0.01))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
thread = threading.Thread(target=bother, daemon=True)
thread.start()
interrupted = finished = 0
end = time.monotonic() + 2
def read_once():
    global interrupted, finished
    some = len(ids) if random.random() < 0.5 else 200  # of a buffer one piece, which who asks takes
    out = np.zeros_like(wanted[:some])
    try:
        reader.read(ids[:some], out=out)
        finished += 1
    except KeyboardInterrupt:
        interrupted += 1
        left = out.copy()
        time.sleep(0.002)
        assert np.array_equal(left, out), "written after the read had raised"
def rounds():  # an interrupt anywhere begins them anew
    global stop, begun
    begun = True
    while time.monotonic() < end:
        read_once()
    stop = True
    while thread.is_alive():
        time.sleep(0.01)
done = False
while not done:
    try:
        try:
            rounds()
            done = True
        except KeyboardInterrupt:
            pass
    except KeyboardInterrupt:  # while one was handled
        pass
for _ in range(20):  # as many as may be under way at once, and more
    assert np.array_equal(reader.read(ids), wanted)
reader.close()
print("interrupted" if interrupted else "never", flush=True)
"""


def check_interrupts(store: featstore.Store, features, kind: str, folder) -> None:
    import numpy as np

    np.save(folder / "x.npy", features)
    arguments = [sys.executable, "-c", PROGRAM, str(store.path), kind, str(folder / "x.npy")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr[-2000:]


def test_interrupts_leave_the_reader_whole(store: featstore.Store, features, engine: str, tmp_path) -> None:
    check_interrupts(store, features, engine, tmp_path)


def test_interrupts_leave_a_buffer_over_it_whole(store: featstore.Store, features, tmp_path) -> None:
    check_interrupts(store, features, "buffer", tmp_path)
