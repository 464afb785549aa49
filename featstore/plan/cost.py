"""The device model: what a read costs, from measured numbers.

At depth, an SSD serves one read in about ``read_seconds + bytes * byte_seconds``: a fixed price for each
request and a price for each byte, the first set by the device's command rate, the second by its bandwidth.
Reading through a gap of g pages is cheaper than a second read as long as
``g * 4096 * byte_seconds < read_seconds``, and because the model is additive, bridging exactly those gaps
gives the cheapest set of reads for a request, from single pages to a scan of the whole table.
``request_seconds`` is what a request costs besides, once (threads woken, first read's latency).
``write_byte_seconds`` is the price of a byte that is written as packs write, checksums and fsync included.

Both prices come from reads at places far apart. Where pages lie close together, devices that read ahead or in
blocks larger than a page make a gap cheaper than that, so the longest gap worth bridging is measured by
itself where it can be (``gap_pages``), on a pattern that wants half of all pages.

One thread that reads is bound by its core at a few hundred thousand reads a second. ``threads`` is how many
the engine may take, where that was measured: more than one only where more were faster. Without it the engine
goes by how busy its cores are. ``read_cpu_seconds`` is what a read of a page takes of the cores.

Which engine reads fastest is measured, too: the model of that one is kept a second time, for
``engine="auto"``, with its name and the ``engine_rates``, reads of a page a second. :func:`calibrated_engine`
gives it.

A model is kept for a file system on a device, not for a device's number, which another one may have tomorrow.

``featstore calibrate`` measures the numbers for a device and an engine and keeps them in the user's cache
directory. A device that was never calibrated gets :data:`DEFAULT`, and every plan says so.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from featstore.base.environment import variable
from featstore.base.files import read_small
from featstore.base.folders import real_path
from featstore.base.system import asking
from featstore.errors import ArgumentError, FormatError
from featstore.storage.disk import Disk
from featstore.storage.manifest import NOT_JSON
from featstore.units import PAGE_BYTES

GAP_PAGES_MAX = 2**31
_BLOCK_DEVICES = Path("/sys/dev/block")
_BY_ITSELF = ("uring", "threads")  # engines that "auto" may stand for


class DeviceModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cost of reads on one device through one engine, in seconds."""

    read_seconds: float
    byte_seconds: float
    request_seconds: float
    gap_pages: int | None = None
    calibrated: bool = True
    write_byte_seconds: float | None = None
    threads: int | None = None
    read_cpu_seconds: float | None = None
    engine: str | None = None
    engine_rates: dict[str, float] | None = None

    def __post_init__(self) -> None:
        if not (
            self.read_seconds >= 0
            and self.byte_seconds > 0
            and self.request_seconds >= 0
            and 0 <= (self.gap_pages or 0) <= GAP_PAGES_MAX
            and (self.write_byte_seconds is None or self.write_byte_seconds > 0)
            and (self.threads is None or self.threads >= 1)
            and (self.read_cpu_seconds is None or self.read_cpu_seconds >= 0)
            and self.engine in (None, *_BY_ITSELF)
        ):
            raise ArgumentError(f"impossible device model: {self}")

    @property
    def gap_pages_max(self) -> int:
        """The longest run of unwanted pages that is cheaper to read through than to skip: measured, or from
        the two prices."""
        if self.gap_pages is not None:
            return self.gap_pages
        return int(min(self.read_seconds / (self.byte_seconds * PAGE_BYTES), GAP_PAGES_MAX))

    def seconds(self, reads: int, bytes_read: int) -> float:
        """Forecast for a request of so many reads and bytes; 0 for a request that reads nothing."""
        if reads == 0:
            return 0.0
        return self.request_seconds + self.busy_seconds(reads, bytes_read)

    def busy_seconds(self, reads: float, bytes_read: float) -> float:
        """What so many reads ask of the device alone: of many requests that overlap, all there is to
        forecast."""
        return reads * self.read_seconds + bytes_read * self.byte_seconds

    @property
    def written_byte_seconds(self) -> float:
        """Of a byte written; where that was not measured, that of a byte read."""
        return self.byte_seconds if self.write_byte_seconds is None else self.write_byte_seconds


#: A SATA-to-NVMe middle ground: about 92k random 4 KiB reads a second, 1.45 GB/s, and a gap that is within a
#: tenth of the best whether the device is at its fastest or at two thirds of that.
DEFAULT = DeviceModel(
    read_seconds=8e-6, byte_seconds=1 / 1.45e9, request_seconds=300e-6, gap_pages=4, calibrated=False
)


def models_path() -> Path:
    """The file that keeps calibrated models: ``$FEATSTORE_CACHE`` or ``$XDG_CACHE_HOME/featstore``,
    ``devices.json``."""
    override = variable("FEATSTORE_CACHE")
    base = (
        Path(override)
        if override
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "featstore"
    )
    return base / "devices.json"


def device_key(path: str | os.PathLike[str], engine: str, access: str) -> str:
    """What a model is kept under: the device that holds ``path`` (its number, the id of its file system and,
    of a block device, its size), the engine, and how files are opened."""
    with asking(path, "look at"):
        device, system = os.stat(path).st_dev, os.statvfs(path).f_fsid
    number = f"{os.major(device)}:{os.minor(device)}"
    return f"{number}-{system:x}-{_sectors(number)}/{engine}/{access}"


def _sectors(number: str) -> str:
    """Size of the block device of this number; "" for what is none, as a network's or a pool's."""
    try:
        return read_small(_BLOCK_DEVICES / number / "size", 2**12).decode().strip()
    except FileNotFoundError:
        return ""


def calibrated_engine(path: str | os.PathLike[str]) -> tuple[str, str] | None:
    """The engine that was measured to be the fastest with direct reads on the device that holds ``path``, and
    the measurement in words; None where that was not measured, or was left open."""
    if not os.path.exists(path):
        return None  # whoever opens the files that were there says so
    model = load_model(device_key(path, "auto", "direct"))
    if model.engine is None:
        return None
    rates = sorted((model.engine_rates or {}).items(), key=lambda one: -one[1])
    measured = ", ".join(f"{rate:,.0f} through {name}" for name, rate in rates)
    return model.engine, f"calibrated: reads of a page a second, {measured}"


def device_model(path: str | os.PathLike[str]) -> DeviceModel:
    """Of direct reads through the engine that ``"auto"`` stands for on the device that holds ``path``."""
    said = variable("FEATSTORE_ENGINE")
    engine = (calibrated_engine(path) or ("uring", ""))[0] if said in ("", "auto") else said
    return load_model(device_key(path, engine, "direct"))


def reading_model(
    path: str | os.PathLike[str], engine: str, access: str, given: DeviceModel | None
) -> DeviceModel:
    """What a reader of ``path`` plans by: the model that it was given, or that of the device. Pages of a
    mapping that nobody looks at are not read: there no gap is worth bridging, whatever was measured."""
    model = given or load_model(device_key(path, engine, access))
    return msgspec.structs.replace(model, gap_pages=0) if access == "mapped" else model


def load_models() -> dict[str, DeviceModel]:
    """All calibrated models, by key. A file that cannot be read as such raises FormatError with its path."""
    path = models_path()
    try:
        text = read_small(path, 2**20)
    except FileNotFoundError:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, DeviceModel])
    except NOT_JSON as error:
        raise FormatError(
            f"{path} is not a list of device models ({error}); remove it and run `featstore calibrate`"
        ) from None


def load_model(key: str) -> DeviceModel:
    """The calibrated model under this key, or :data:`DEFAULT`."""
    return load_models().get(key, DEFAULT)


def save_model(key: str, model: DeviceModel) -> Path:
    """Keep a model; returns the file. Other keys stay as they are. Raises DiskFullError, DeviceError: then
    the file is as before, or the new one, whole, whose name alone may not outlast a power cut."""
    path = models_path()
    with asking(path.parent, "create directory"):
        path.parent.mkdir(parents=True, exist_ok=True)
    models = load_models() | {key: model}
    Disk().replace_file(real_path(path), msgspec.json.format(msgspec.json.encode(models), indent=2))
    return path
