"""What ``featstore pack`` is asked for, by table and by graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from featstore_cli.options import SHAPE, check_tables, of_table

CASTS = ("float16", "bfloat16", "float32", "float64")
ORDERS = ("auto", "given", "permutation", "degree", "metis", "multilevel", "ldg", "bfs")
_EDGE_VALUES = ("edge_weights", "edge_times")


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


class PackRequest:
    """What is asked for, by table; every mistake that can be seen without reading data is a usage error."""

    def __init__(self, values: dict[str, dict[str | None, str]]) -> None:
        self.values = values
        paths = values["features"]
        if None in paths and len(paths) > 1:
            raise click.BadParameter(
                "several tables need names: --features paper=p.npy --features author=a.npy",
                param_hint="--features",
            )
        self.paths = {name or "features": Path(path) for name, path in paths.items()}
        self.features: dict[str, Any] = self.paths | self._nodes()
        self.data_set = self._data_set()
        self.graphs = [name for name in values["graph"] if name is not None and name not in self.features]

    def _nodes(self) -> dict[str, int]:
        """The types of nodes without features."""
        found = {}
        for name, text in self.values["nodes"].items():
            if name is None or not text.isdecimal():
                raise click.BadParameter(
                    f"{text!r} should be a type and its number of nodes, such as author=5000",
                    param_hint="--nodes",
                )
            if name in self.paths:
                raise click.BadParameter(f"{name!r} has --features, too", param_hint="--nodes")
            found[name] = int(text)
        return found

    def _data_set(self) -> Path | None:
        """The only path, where it brings tables of its own, which nobody can name before it is read."""
        from featstore.packing.sources.data_sets import is_data_set

        path = self.paths.get("features")
        return path if list(self.values["features"]) == [None] and is_data_set(path) else None

    def check(self) -> None:
        self._check_forms()
        if self.data_set is not None:
            self._check_data_set()
            return
        for name in self.values:
            if name in ("graph", "graph_key", *_EDGE_VALUES):
                self._check_graphs(name)
            elif name not in ("features", "array", "nodes"):
                check_tables(self.values[name], self.features, flag_of(name))
        self._one_table("graph", "graph_key", "permutation", "node_keys")
        if self.graphs and None in self.values["graph"]:
            raise click.UsageError(
                f"--graph {self.values['graph'][None]} does not say between which nodes, and --graph "
                f"{self.graphs[0]}=... does: write of both --graph A__RELATION__B=PATH"
            )
        for name in _EDGE_VALUES:
            self._check_once(name)
        for table in self.paths:
            self._check_table(table)

    def _check_forms(self) -> None:
        """A usage error for a shape or a number that is none, of whatever it is given for."""
        for text in self.values["shape"].values():
            self._parsed(SHAPE.parse, text, "--shape")
        for name, least in (("partitions", 1), ("offset", 0)):
            for text in self.values[name].values():
                if not text.isdecimal() or int(text) < least:
                    raise click.BadParameter(
                        f"{text!r} is not a whole number of at least {least}", param_hint=f"--{name}"
                    )

    def _check_data_set(self) -> None:
        if self.values["nodes"]:
            raise click.UsageError(f"--nodes is given, and {self.data_set} says how many nodes there are")
        for name in self.values:
            self._check_once(name)

    def _check_once(self, name: str) -> None:
        given = self.values[name]
        if None in given and len(given) > 1:
            raise click.UsageError(f"{flag_of(name)} is given once for all, and for one: say for each")

    def _check_graphs(self, name: str) -> None:
        """A usage error for what is of a graph that is none: a table's, or that of an edge type."""
        from featstore.storage.edge_types import split_joined

        for graph in self.values[name]:
            if graph in self.graphs and not split_joined(str(graph), list(self.features)):
                known = ", ".join(map(repr, self.features))
                raise click.BadParameter(
                    f"no table is called {graph!r}; there is {known}; and it is no edge type A__RELATION__B "
                    "between these",
                    param_hint=flag_of(name),
                )
        check_tables(self.values[name], [*self.features, *self.graphs], flag_of(name))

    def _check_table(self, table: str) -> None:
        shape, cast, order = (self._of(name, table) for name in ("shape", "cast", "order"))
        if order not in (None, *ORDERS):
            raise click.BadParameter(
                f"{order!r} is no order; choose one of {', '.join(ORDERS)}", param_hint="--order"
            )
        if self._of("graph_key", table) is not None and self._of("graph", table) is None:
            raise click.UsageError(f"--graph-key is given, but table {table!r} has no --graph")
        if order == "permutation" and self._of("permutation", table) is None:
            raise click.UsageError("--order permutation needs --permutation FILE.npy")
        wanted = self._cast(table)
        if wanted not in (None, *CASTS):
            hint = "--cast" if cast is not None else "--dtype"
            more = (
                "; for the dtype of a headless file give --shape, too"
                if hint == "--dtype" and shape is None
                else ""
            )
            raise click.BadParameter(
                f"cannot cast to {wanted!r}; choose one of {', '.join(CASTS)}{more}", param_hint=hint
            )

    @staticmethod
    def _parsed(parse: Any, text: str, flag: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint=flag) from None

    def _of(self, name: str, table: str) -> str | None:
        return of_table(self.values[name], table)

    def _cast(self, table: str) -> str | None:
        """The dtype to cast to: what ``--dtype`` means depends on the file."""
        from featstore.errors import SourceError
        from featstore.packing.inputs import dtypes_asked

        asked: dict[str, Any] = {
            name: self._of(name, table) for name in ("raw_dtype", "dtype", "cast", "shape")
        }
        try:
            wanted: str | None = dtypes_asked(
                self.paths[table], table, asked | {"offset": int(self._of("offset", table) or 0)}
            )[1]
        except SourceError:
            if asked["dtype"] is None or asked["cast"] is None:
                raise  # of the source itself
            raise click.UsageError("--dtype and --cast both ask for a cast; give one of them") from None
        return wanted

    def options(self) -> dict[str, Any]:
        """Arguments of `featstore.pack`, by table."""
        parse: dict[str, Callable[[str], Any]] = {
            "graph": str, "graph_key": str, "order": str, "permutation": str, "partitions": int, "dtype": str,
            "cast": str, "raw_dtype": str, "shape": SHAPE.parse, "offset": int, "key": _names,
            "columns": _names, "id": str, "node_keys": str,
        }  # fmt: skip
        if self.data_set is not None:
            own = {name: self.values[name] for name in (*parse, *_EDGE_VALUES) if self.values[name]}
            read_all = {n: {t: parse.get(n, str)(x) for t, x in given.items()} for n, given in own.items()}
            return {name: given.get(None, given) for name, given in read_all.items()}
        tables = [*self.features, *self.graphs]
        found: dict[str, Any] = {
            name: {t: read(text) for t in tables if (text := self._given(name, t)) is not None} or None
            for name, read in parse.items()
            if self.values[name]
        }
        for name in _EDGE_VALUES:
            values = self.values[name]
            if values:
                found[name] = values.get(None, values)
        return found

    def _given(self, name: str, table: str) -> str | None:
        """What is given for a table or graph; what is given for all is of those that it can be of."""
        ordered = table in self.features and name in ("order", "partitions")
        if (table in self.paths or ordered) and not (name == "graph" and self.graphs):
            return self._of(name, table)
        return self.values[name].get(table)

    def _one_table(self, *names: str) -> None:
        for name in names:
            if None in self.values[name] and len(self.features) > 1:
                table = next(iter(self.features))
                raise click.UsageError(
                    f"there are several tables; say whose {flag_of(name)} it is: {flag_of(name)} {table}=..."
                )

    def train(self, arrays: dict[str, Any]) -> str | dict[str, str] | None:
        """``train=``: names of arrays, by table. Those of a data set are known when it is read."""
        given = self.values["train"]
        if self.data_set is not None:
            return given.get(None, given) or None  # type: ignore[arg-type]
        for name in given.values():
            if name not in arrays:
                known = ", ".join(arrays) or "none"
                raise click.BadParameter(
                    f"{name!r} is none of the arrays given with --array ({known})", param_hint="--train"
                )
        found = {table: self._of("train", table) for table in self.paths}
        found |= {table: text for table, text in given.items() if table in self.features}
        return {table: text for table, text in found.items() if text is not None} or None


def _names(text: str) -> str | list[str]:
    """``a,b`` as the names of columns; one name as it is."""
    return [name.strip() for name in text.split(",")] if "," in text else text
