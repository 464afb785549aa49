"""cuGraph's saved samples as traces: files as its writers make them, after python/cugraph/cugraph/gnn/
data_loading/dist_io/writer.py of rapidsai/cugraph at 2d06808, written by pyarrow. cuGraph has not run
here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.errors import FeatstoreWarning, IdError, SourceError
from featstore.trace.trace import Trace

pa = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

from featstore.adapters.cugraph_samples import SavedSamples  # noqa: E402

HOPS = 2
Batches = list[tuple[np.ndarray[Any, Any], dict[str, Any]]]


def sampled(count: int, seed: int = 0) -> Batches:
    """Mini-batches as they should come out, compressible: col ascends over all hops."""
    rng, found = np.random.default_rng(seed), []
    for number in range(count):
        nodes = rng.permutation(1000)[: rng.integers(6, 30)]
        counts = [int(n) for n in (0, 0) if number == 1] or rng.integers(1, 20, HOPS).tolist()
        col = np.sort(rng.integers(0, 3, counts[0])), np.sort(rng.integers(3, 6, counts[1]))
        sample: dict[str, Any] = {
            "row": rng.integers(0, len(nodes), sum(counts)), "col": np.concatenate(col),
            "num_sampled_edges": tuple(counts), "e_id": rng.integers(0, 9999, sum(counts)),
            "weight": rng.random(sum(counts)).astype(np.float32), "input_index": rng.integers(0, 99, 3),
            "edge_inverse": rng.integers(0, 6, 6),
        }  # fmt: skip
        found.append((nodes.astype(np.int64), sample))
    return found


def ascending(sizes: Any, first: int) -> np.ndarray[Any, Any]:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64) + first


def columns_of(batches: Batches, compressed: bool = False, first: int = 0) -> dict[str, Any]:
    """The arrays of a file; ``first``: what offsets begin with, as they go on from other files."""

    def joined(name: str) -> Any:
        return np.concatenate([sample[name] for _, sample in batches])

    hops = [n for _, sample in batches for n in sample["num_sampled_edges"]]
    found: dict[str, Any] = {
        "majors": joined("col"), "minors": joined("row"),
        "map": np.concatenate([nodes for nodes, _ in batches]),
        "label_hop_offsets": ascending(hops, first), "weight": joined("weight"), "edge_id": joined("e_id"),
        "edge_type": np.empty(0, np.int32),
        "renumber_map_offsets": ascending([len(nodes) for nodes, _ in batches], first),
        "input_index": joined("input_index"), "input_offsets": ascending([3] * len(batches), first),
        "edge_inverse": joined("edge_inverse"),
    }  # fmt: skip
    if compressed:  # three lists a hop
        lists = [np.bincount(sample["col"], minlength=6) for _, sample in batches]
        found["major_offsets"] = ascending(np.concatenate(lists), first)
        found["label_hop_offsets"] = ascending([3] * len(hops), first)
        del found["majors"]
    return found


def save(path: Path, arrays: dict[str, Any]) -> None:
    longest = max(map(len, arrays.values()))
    table = {
        name: pa.array(
            [*values.tolist(), *[None] * (longest - len(values))], pa.from_numpy_dtype(values.dtype)
        )
        for name, values in arrays.items()
    }
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pa.table(table), path)


def same(found: Any, batches: Batches) -> None:
    assert len(found) == len(batches)
    for (ids, sample), (nodes, expected) in zip(found, batches, strict=True):
        assert (ids[""] if isinstance(ids, dict) else ids).tolist() == nodes.tolist()
        assert {k: np.asarray(v).tolist() for k, v in sample.items()} == {
            k: np.asarray(v).tolist() for k, v in expected.items()
        }


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("named", ["batch=00000.{:08d}-00000.{:08d}.parquet", "batch={}-{}.parquet"])
def test_a_trace_has_what_was_saved(tmp_path: Path, compressed: bool, named: str) -> None:
    batches = sampled(12)
    folder = tmp_path / "samples"
    for low, high in ((8, 12), (0, 4), (4, 8)):  # twelve after two by name, as numbers
        arrays = columns_of(batches[low:high], compressed, first=100 * low)
        save(folder / named.format(low, high - 1), arrays)
    samples = SavedSamples(folder)
    same(samples, batches)
    same([samples[-1]], batches[-1:])
    same(samples[3:5], batches[3:5])
    assert "12 mini-batches, 3 files" in repr(samples)
    with pytest.raises(IdError, match="mini-batch 12 is none of the 12"):
        samples[12]
    with Trace.record(samples, tmp_path / "trace") as trace:
        same(trace, batches)


def test_files_stand_by_rank_and_last_may_count_hops(tmp_path: Path) -> None:
    batches = sampled(6)
    save(tmp_path / "batch=00001.00000002-00001.00000003.parquet", columns_of(batches[4:]))
    save(tmp_path / "batch=00000.00000000-00000.00000003.parquet", columns_of(batches[:2]))
    save(tmp_path / "batch=00000.00000004-00000.00000007.parquet", columns_of(batches[2:4]))
    same(SavedSamples(tmp_path), batches)


def test_what_is_not_saved_is_not_there(tmp_path: Path) -> None:
    arrays = columns_of(sampled(3))
    for name in ("weight", "edge_id", "input_index", "input_offsets", "edge_inverse"):
        del arrays[name]
    save(tmp_path / "batch=0-2.parquet", arrays)
    assert set(SavedSamples(tmp_path)[0][1]) == {"row", "col", "num_sampled_edges"}


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    batches = sampled(6)
    save(tmp_path / "batch=0-1.parquet", columns_of(batches[:2]))
    save(tmp_path / "batch=4-5.parquet", columns_of(batches[4:]))
    with pytest.warns(FeatstoreWarning, match="no file has mini-batches 2 to 3"):
        same(SavedSamples(tmp_path), batches[:2] + batches[4:])


def test_a_missing_file_of_one_rank_is_told(tmp_path: Path) -> None:
    """Each has begun anew, and the other's numbers hide nothing."""
    batches = sampled(12)
    for rank, firsts in ((0, (0, 2, 4)), (1, (0, 4))):
        for first in firsts:
            name = f"batch={rank:05}.{first:08}-{rank:05}.{first + 1:08}.parquet"
            save(tmp_path / name, columns_of(batches[6 * rank + first :][:2]))
    with pytest.warns(FeatstoreWarning, match="no file has mini-batches 2 to 3"):
        same(SavedSamples(tmp_path), [*batches[:8], *batches[10:]])


def changed(name: str, values: Any) -> dict[str, Any]:
    return columns_of(sampled(3)) | {name: np.asarray(values)}


def without(*names: str) -> dict[str, Any]:
    return {name: values for name, values in columns_of(sampled(3)).items() if name not in names}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (changed("label_type_hop_offsets", [0, 1]), "has the columns .*label_type_hop_offsets; read are"),
        (without("map"), "has the columns majors, minors, label_hop_offsets"),
        (
            {name: np.arange(3) for name in ("sources", "destinations", "batch_id", "hop_id")},
            "columns sources",
        ),
        (without("majors"), "either of majors and major_offsets"),
        (changed("renumber_map_offsets", [0, 1, 2, 3]), "renumber_map_offsets does not rise by"),
        (changed("renumber_map_offsets", [5]), "there is no mini-batch"),
        (changed("label_hop_offsets", [0, 1, 2]), "no whole number of hops"),
        (changed("label_hop_offsets", [0, 5, 4, 6, 7, 8, 9]), "label_hop_offsets does not rise"),
        (changed("edge_id", [1, 2]), "'edge_id' has 2 values"),
        (changed("input_offsets", [0, 1]), "does not divide input_index"),
        (changed("edge_inverse", [0, 1]), "'edge_inverse' has 2 values, not 18"),
        (changed("map", [0.5, 1.5]), "'map' holds double"),
        (columns_of(sampled(3)) | {"majors": columns_of(sampled(3))["majors"] + 90}, "lead outside its"),
    ],
)
def test_anything_else_is_an_error(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    save(tmp_path / "batch=0-2.parquet", arrays)
    with pytest.raises(SourceError, match=message):
        list(SavedSamples(tmp_path))


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no file batch="):
        SavedSamples(tmp_path)
    with pytest.raises(SourceError, match="is no directory"):
        SavedSamples(tmp_path / "nowhere")
    save(tmp_path / "batch=0-2.parquet", columns_of(sampled(3)))
    save(tmp_path / "batch=2-4.parquet", columns_of(sampled(3)))
    with pytest.raises(SourceError, match=r"begins at mini-batch 2, which batch=0-2\.parquet has as well"):
        SavedSamples(tmp_path)
    (tmp_path / "batch=2-4.parquet").write_bytes(b"no parquet")
    with pytest.raises(SourceError, match="not a readable Parquet file"):
        SavedSamples(tmp_path)
    (tmp_path / "batch=2-4.parquet").rename(tmp_path / "part-0.parquet")
    with pytest.raises(SourceError, match="not a name of cuGraph's saved samples"):
        SavedSamples(tmp_path)


def test_nulls_are_at_the_end(tmp_path: Path) -> None:
    arrays = columns_of(sampled(3))
    save(tmp_path / "batch=0-2.parquet", arrays)
    table = parquet.read_table(tmp_path / "batch=0-2.parquet")
    at = table.schema.get_field_index("renumber_map_offsets")
    moved = pa.array([None, *table.column(at).to_pylist()[:-1]], pa.int64())
    parquet.write_table(table.set_column(at, "renumber_map_offsets", moved), tmp_path / "batch=0-2.parquet")
    with pytest.raises(SourceError, match="nulls before its end"):
        SavedSamples(tmp_path)
