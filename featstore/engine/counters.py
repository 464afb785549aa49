"""What an engine counts while it reads: an int64 vector that kernels add to, one for each thread that
reads."""

from __future__ import annotations

READS = 0
BYTES_READ = 1
SHORT_READS = 2  # reads that the system cut short or asked to repeat, and that were issued again
NS_WAIT = 3  # waiting for the device, nothing else to do
NS_VERIFY = 4
NS_COPY = 5
LATENCY = 6  # the first of the latency buckets: bucket b holds reads of less than 2**b * 1.024 microseconds
LATENCY_BUCKETS = 26
COUNTERS = LATENCY + LATENCY_BUCKETS


def latency_edge(bucket: int) -> float:
    """The upper edge of a latency bucket, in microseconds. The last one also has what took longer."""
    return round(2.0**bucket * 1.024, 3)
