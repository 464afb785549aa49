"""How the loader of each mode is made from what was said: ranks and their shares, memory, and the mode's own
options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from featstore import arguments as args
from featstore.base.closers import Closers
from featstore.base.training_nodes import checked_train
from featstore.compile.budget import parse_disk
from featstore.errors import ArgumentError, BudgetError, SourceError
from featstore.hosts.split_store import WholeStore
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.compiled.mode import check_reused, compiled_mode
from featstore.loaders.compiled.options import check_loader_options
from featstore.loaders.costs.auto import Taken, auto
from featstore.loaders.costs.partitions import OwnSampling
from featstore.loaders.divided import GivenShare, check_given
from featstore.loaders.host.links import LinksOfRanks
from featstore.loaders.host.mode import HostMode
from featstore.loaders.host.place import on_host, place_of
from featstore.loaders.mega.loader import PartitionsLoader
from featstore.loaders.mega.owned import owned_partitions
from featstore.loaders.modes import Mode, PartitionsMode, RollingMode, closed_unless_done
from featstore.loaders.online.loader import OnlineLoader
from featstore.loaders.online.lookahead import Lookahead, tables_looked_at
from featstore.loaders.options import BATCH_SIZE, SAMPLING, Given
from featstore.loaders.over_hosts import auto_is_online, check_ranks, check_rows, halo_bytes, tell_uneven
from featstore.loaders.prefetch import Sampler
from featstore.loaders.ranks import Ranks
from featstore.loaders.rolling import RollingLoader
from featstore.loaders.said import recorded_of, samples_of
from featstore.loaders.samplers import kept_ahead, rows_first, sampler_within, typed_sampler_within
from featstore.loaders.shares import MemoryShares
from featstore.loaders.typed import whole_of
from featstore.sampling.attributes import said_otherwise
from featstore.sampling.batches import RankedBatches
from featstore.sampling.seed_list import SeedList
from featstore.sampling.typed_store import TypedSeeds
from featstore.storage.packs import check_pack_name
from featstore.storage.relations import graph_of
from featstore.storage.store import OpenStore

_OF_A_RANK = ("rank", "progress")  # options that ranks that share a loader may have of their own
_COMPILING = ("device", "name", "disk", "residency", "device_memory")


class Making:
    """Makes the loader of a mode. ``opened`` closes what was opened for it; ``whole``: what makes
    mini-batches whole; ``shares``: of the memory, of which ``aside`` bytes more are for others; ``taken``:
    which mode, and why."""

    def __init__(
        self, store: OpenStore, batches: Sampler | LinksOfRanks | None, given: Given, memory_bytes: int,
        aside: int, opened: Closers,
    ) -> None:  # fmt: skip
        self.store, self.given, self._opened = store, given, opened
        self._links = batches if isinstance(batches, LinksOfRanks) else None
        self._batches = batches = None if isinstance(batches, LinksOfRanks) else batches
        self.taken = Taken(given.mode, "asked for", None)
        self._sampled = given.get("seeds") is not None
        self.ranks = Ranks.of(given.get("rank"), given.get("world_size"), batches)
        check_rows(store)
        if isinstance(store, WholeStore):
            check_ranks(store, given, self.ranks, batches)
            if given.auto:
                because = "what rows of other hosts take is not known beforehand: ask for another mode, mode="
                self.taken = auto_is_online(given, because)
        self.drop_last = args.as_flag(given.get("drop_last", False), "drop_last")
        parts = store, given.get("edge_table"), given.get("attach", ())
        self.whole = whole_of(*parts, named=given.get("nodes") is not None)
        held = self.whole.held_bytes + halo_bytes(store, given, batches)
        if held >= memory_bytes:
            what = "hold the arrays that are attached to mini-batches, and the halo"
            raise BudgetError(held + aside + 1, memory_bytes + aside, what)
        self.shares = MemoryShares(memory_bytes - held, 0, held + aside)
        self.share: RankedBatches | GivenShare | None = None
        self._alike: dict[str, Any] = {}  # what all hosts are to say of it
        self._then: Callable[[], None] = lambda: None  # what is checked when they have
        self._here: tuple[int, ...] = (self.ranks.rank,)  # the ranks whose mini-batches are made here
        if batches is not None or self._links is not None:
            check_given(given, batches)
        elif given.get("fanouts") is None if self._sampled else not self._compiled_before():
            raise ArgumentError("give batches, or seeds= and fanouts= for the store to sample")
        elif not self._sampled:
            self._check_compiled()

    def mode(self) -> Mode:
        """The mode, over its loader."""
        given, ranks = self.given, self.ranks
        shared = given.get("shared", False)
        if isinstance(self.store, WholeStore):
            place = on_host(shared, given.said, self.store)
        else:
            place = place_of(shared, ranks.rank, ranks.shares, given.said)
        if given.auto and ranks.shares > 1:  # who would each go by its own clock
            self.taken = auto_is_online(given, "several ranks take another mode only where it is asked for")
        if place is None:
            links = self._links_of((ranks.rank,), self.shares.memory_bytes)
            mode = self._made(self._batches if links is None else links)
        else:
            alike = {name: value for name, value in given.said.items() if name not in _OF_A_RANK}
            alike |= {} if self._links is None else self._links.alike
            # as of a loader of its own: of seeds, or of mini-batches around links
            per_step = ranks.shares * (self._seeds_of_a_step()["batch_size"] if self._links is None else 1)
            alike |= {"store": self.store.uuid, "timeout_seconds": place.timeout_seconds}
            mode = HostMode(
                place, ranks.rank, alike, self.shares.memory_bytes,
                bool(given.tensors), 0 if given.mode == "partitions" else per_step, self._for_host,
            )  # fmt: skip
        self._opened.callback(mode.close)
        return mode

    def _for_host(self, ranks: tuple[int, ...], memory_bytes: int) -> Mode:
        """The mini-batches of these ranks in turn, for a :class:`HostMode`."""
        self._here, self.given.tensors = ranks, False
        whole, self.shares = self.shares, MemoryShares(memory_bytes)
        mode, self.shares = self._made(self._links_of(ranks, memory_bytes)), whole
        return mode

    def _links_of(self, ranks: tuple[int, ...], memory_bytes: int) -> Sampler | None:
        """The mini-batches of these ranks around links, which divide themselves, if any."""
        if self._links is None:
            return None
        made, shares = self._links.make(memory_bytes, ranks, self.ranks.world_size)
        self._opened.callback(made.close)
        self.shares = replace(shares, beside_bytes=shares.beside_bytes + self.shares.beside_bytes)
        self.ranks = replace(self.ranks, shares=1)
        return made

    def _made(self, batches: Sampler | None) -> Mode:
        """The mode of the ranks here. Hosts agree last: what fails on one alone may be tried again."""
        given, _ = self.given, self.whole.arrays  # which are there from now on
        if batches is not None:
            divided = self.ranks.world_size if self.ranks.shares < self.ranks.world_size else 0
            self.share = GivenShare(batches, self.ranks.rank, self.ranks.shares, self.drop_last, divided)
            self._alike = dict(self.share.alike, mode=given.mode) if self.share.alike else {}
        elif self._sampled and given.mode != "partitions":
            self.share = self._sample()
        if given.mode == "auto":
            self.taken = self._taken(batches)
            given.mode = self.taken.mode
        if isinstance(given.get("halo"), int | str):
            self.shares = kept_ahead(self.store, self.share, self.shares)
        make = {
            "online": self._online, "compiled": self._compiled, "rolling": self._rolling,
            "partitions": self._partitions,
        }  # fmt: skip
        with self.shares.told_of_all():
            mode = make[given.mode](given.of_mode())
        mode.share, mode.told_of_all, mode.whole = self.share, self.shares.told_of_all, self.whole.batch
        with closed_unless_done(mode):
            if isinstance(self.store, WholeStore):
                mode.check = self.store.check_loaders
                if self._alike:
                    mode.say = partial(self.store.say_position, self.store.agree(self._alike))
            self._then()
        return mode

    def _taken(self, batches: Sampler | None) -> Taken:
        """What ``"auto"`` takes."""
        given, own = self.given, None
        self._check_compiling({name: given.said[name] for name in given.said if name in _COMPILING})
        if isinstance(self.share, RankedBatches):
            batches = self.share
            if not self._of_types and not isinstance(self.share.sampler, SeedList):
                fanouts = args.as_fanouts(given.get("fanouts"))
                own = OwnSampling(given.get("seeds"), fanouts, self.share.batch_size, given.get("graph"))
        assert batches is not None
        memory = self.shares.memory_bytes
        return auto(self.store, batches, own, memory, given.said, given.reading, self.whole)

    # Whose mini-batches.

    @cached_property
    def samples(self) -> str:
        """What tells what is sampled here from others."""
        return samples_of(self.store, self.given, self._links or self._batches)

    def _check_compiled(self) -> None:
        """Mini-batches are those of a trace that is compiled."""
        passed = ("seeds", "seed") if self.given.get("shuffle") else ("seeds",)
        others = [name for name in SAMPLING if name not in passed]
        for name in (*others, "nodes", "drop_last", "shared"):
            if self.given.said.get(name, False) is not False:
                ways = [] if self._alone else ["give seeds= and fanouts=, too"]
                beside = isinstance(self.store, WholeStore) and self.store.place.ranks > 1
                ways += [] if name == "shared" and beside else ["leave it out"]
                what = "is for sampling, and what was compiled is taken as it is"
                raise ArgumentError(f"{name}= {what}: {', or '.join(ways)}")

    def _compiled_before(self) -> bool:
        """There are no mini-batches, and none are needed."""
        return self.given.mode == "compiled" and (self._alone or bool(self.given.get("reuse")))

    @property
    def _alone(self) -> bool:
        """The store is a compiled trace, opened without the one that it was compiled for."""
        return self.store.manifest.compiled is not None

    def _sample(self) -> RankedBatches:
        """The store's own mini-batches, this rank's share of them, within a share of the memory."""
        given, graph, seeds = self.given, self.given.get("graph"), self.given.get("seeds")
        if self._of_types:
            return self._sample_types()
        fanouts, _ = args.as_fanouts(given.get("fanouts")), (self._seeds_of_a_step(), self._in_order)
        nodes = self.store.arrays[seeds] if isinstance(seeds, str) else seeds
        sampler, table, self.shares = sampler_within(
            self.store, fanouts, self.shares, seed=self._seed, graph=graph,
            check=self.whole.check_sampled, said=given.said, reading=given.reading,
        )  # fmt: skip
        self._opened.callback(getattr(sampler, "close", lambda: None))
        made = self._divided(sampler, nodes, table.name)
        self.shares = rows_first(made, {table.name: table}, self.shares)
        return made

    def _divided(self, sampler: Any, seeds: Any, table: str) -> RankedBatches:
        """The mini-batches around nodes of a table, each host's around its own."""
        here, in_order, owned = self._here, self._in_order, dict[str, Any]()
        listed = SeedList.over(sampler, seeds, self.given.get("input_time"))
        if isinstance(self.store, WholeStore):
            place, hosts = self.store.place, self.store.owners[table].hosts
            ids = checked_train(seeds, sampler.node_count, repeated=True)
            owner = hosts if listed is None else hosts[ids]
            size = self._seeds_of_a_step()["batch_size"]
            tell_uneven(hosts[ids], place.hosts, place.ranks, size, self.drop_last)
            here, owned = tuple(map(place.share, here)), {"owner": owner, "hosts": place.hosts}
            self._alike = {"samples": self.samples, "mode": self.given.mode, "in_order": in_order}
            self._alike |= self._seeds_of_a_step()
        if listed is not None:
            sampler, seeds = listed, listed.numbers
        made = RankedBatches(
            sampler, seeds, own=True, ranks=here, in_order=in_order, **owned, **self._seeds_of_a_step()
        )
        self._opened.callback(made.close)
        if not len(made):
            raise ArgumentError(
                f"drop_last= leaves no mini-batch of {made.batch_size:,} seeds for {self.ranks.shares} "
                "ranks: give fewer a batch"
            )
        return made

    @property
    def _of_types(self) -> bool:
        """The store samples over all its edge types."""
        return self._sampled and bool(self.store.edge_types) and self.given.get("graph") is None

    def _sample_types(self) -> RankedBatches:
        """The same over all edge types."""
        seeds = TypedSeeds.of(self.store, self.given.get("seeds"), repeated=True)
        fanouts, _ = self.given.get("fanouts"), (self._seeds_of_a_step(), self._in_order)
        sampler, self.shares = typed_sampler_within(
            self.store, seeds, fanouts, self.shares, self._seed, self.given.said, self.given.reading
        )
        self._opened.callback(getattr(sampler, "close", lambda: None))
        made = self._divided(sampler, seeds.ids, seeds.node_type)
        tables = {name: self.store.tables[name] for name in self.store.node_types}
        self.shares = rows_first(made, tables, self.shares)
        return made

    def _seeds_of_a_step(self) -> dict[str, Any]:
        """How seeds are divided among ranks."""
        size = args.as_count(self.given.get("batch_size", BATCH_SIZE), "batch_size")
        return {"world_size": self.ranks.shares, "batch_size": size, "drop_last": self.drop_last}

    @property
    def _in_order(self) -> bool:
        return args.as_flag(self.given.get("seeds_in_order", False), "seeds_in_order")

    @property
    def _seed(self) -> int:
        return args.as_integer(self.given.get("seed", 0), "seed")

    def _wanted(self, own: dict[str, Any], recorded: bool, made: Sampler | None = None) -> Sampler | None:
        """This rank's mini-batches, ``made`` if not by its share, as whoever reads their rows takes them."""
        own.pop("edge_table", None)
        batches = self.share.epoch if isinstance(self.share, GivenShare) else made or self.share
        if batches is None:
            return None
        check = self.store.check_peers if isinstance(self.store, WholeStore) else None
        wanted = self.whole.wanted(batches, own.get("nodes"), recorded, check)
        if wanted is None:
            return batches
        own.pop("nodes", None)
        return wanted.epoch

    def _online(self, own: dict[str, Any]) -> Mode:
        halo, looking = own.get("halo"), None
        if isinstance(halo, int | str):
            assert isinstance(self.store, WholeStore)
            tables = tables_looked_at(self.store, self.share, self._of_types, self.given.get("graph"))
            kept = self.shares.ahead_bytes
            looking = Lookahead(self.store, self.share, halo, tables, own.get("nodes"), kept)
            own["halo"] = looking.ahead
        batches = self._wanted(own, recorded=False, made=None if looking is None else looking.sampled)
        if looking is not None:
            looking.trained, batches = batches, looking.epoch
        assert batches is not None
        assert self.share is not None
        loader = OnlineLoader(
            self.store, batches, memory=self.shares.rows_bytes, tensors=self.given.tensors, **own,
            **self.given.reading,
        )  # fmt: skip
        loader.samples = isinstance(self.share, RankedBatches) or self.share.drawn_here
        if looking is not None:
            loader.on_begin, looking.unwanted = looking.begin, loader.is_stopping
        return Mode(loader)

    def _compiled(self, own: dict[str, Any]) -> Mode:
        recorded = self._wanted(own, recorded=True)
        if self._alone and (recorded is not None or "name" in own):
            raise ArgumentError(
                f"{self.store.path} is a compiled trace itself: mini-batches, seeds= and name= are for the "
                "store that it was compiled for"
            )
        share, steps = self.share, None
        if isinstance(share, RankedBatches) or (share is not None and share.of_links):
            steps = share.epoch_steps() * (len(self._here) if isinstance(share, RankedBatches) else 1)
        device, name = self._check_compiling(own)
        options = {"device": device, "tensors": self.given.tensors, "buffer": own.pop("buffer", None)}
        check_loader_options(CompiledLoader, options)
        known = self._links or self._batches, self._here, self._seeds_of_a_step()
        by = recorded_of(self.store, self.given, *known)
        mode = compiled_mode(
            self.store, recorded, None if self._alone else name, memory=self.shares.rows_bytes,
            sampled_by=by[0] if by else None,
            seed=self._seed, loader=options | self.given.reading, progress=self.given.tell, **own,
        )  # fmt: skip
        self._then = partial(check_reused, mode.loader.compiled, name, steps, by)
        if not isinstance(self.share, GivenShare) or self.share.of_links:  # reuse= may find other ones there
            as_asked = not by or mode.loader.compiled.sampled_by in ("", *by)
            self._alike["recorded"] = mode.loader.compiled.epochs().tolist(), as_asked
        with closed_unless_done(mode):
            sampled = self._sampled and self.given.get("nodes") is None  # which may have wanted others
            self.whole.check_compiled(mode.loader.compiled.entry.tables, sampled)
        return mode

    def _rolling(self, own: dict[str, Any]) -> Mode:
        recorded = self._wanted(own, recorded=True)
        assert recorded is not None
        device, name = self._check_compiling(own)
        options = {"device": device, "tensors": self.given.tensors, **self.given.reading}
        own["tell"] = self.given.tell
        loader = RollingLoader(
            self.store, recorded, memory=self.shares.rows_bytes, loader=options, name=name, **own
        )
        return RollingMode(loader)

    def _partitions(self, own: dict[str, Any]) -> Mode:
        said = said_otherwise(self.given.said)
        if self._in_order:
            raise ArgumentError(
                "seeds_in_order= is not of mode 'partitions', where those come together whose partitions do"
            )
        alone = self.ranks.shares == 1 and not isinstance(self.store, WholeStore)
        if isinstance(own.get("passes"), str) and not alone:
            raise ArgumentError("passes='auto' follows each rank's own clock: give a number of passes")
        if not self.store.edge_types:
            self.whole.check_sampled(graph_of(self.store, self.given.get("graph")))
        elif not self._of_types:
            raise ArgumentError(
                "graph= names one graph, and of a store with edge types mode 'partitions' samples over all: "
                "leave it out, and give fanouts= by edge type, with 0 for those that are not wanted"
            )
        fanouts, own = self.given.get("fanouts"), own | self.given.reading | self._seeds_of_a_step()
        own |= {"train": self.given.get("seeds"), "graph": self.given.get("graph"), "seed": self._seed}
        own |= {"memory": self.shares.rows_bytes, "tensors": self.given.tensors, "ranks": self._here}
        own["edge_table"] = self.whole.wanted_edge_tables
        own["said"] = {name: self.given.said[name] for name in said}
        if isinstance(self.store, WholeStore):
            del own["world_size"]  # of which this host has its own ranks
            return owned_partitions(self.store, fanouts, **own)
        return PartitionsMode(PartitionsLoader(self.store, fanouts, **own))

    def _check_compiling(self, own: dict[str, Any]) -> tuple[Any, str]:
        """Take device and name out of the options of compiling; raise for what it would refuse, before it is
        recorded for. Each rank has a name of its own, and ranks that share a loader have one together."""
        device, name = own.pop("device", None), own.pop("name", "loader")
        check_pack_name(name)
        parse_disk(own.get("disk"), self.store)
        args.as_choice(own.get("residency", "min"), "residency", ("min", "fixed"))
        device = None if device is None else args.as_device(device, "device")
        if own.get("device_memory") is not None and device is None:
            raise SourceError("device_memory= keeps rows on a device: say on which, with device=")
        if isinstance(self.store, WholeStore):  # in the part of this host, whichever number it has in the run
            ranks = self.store.place.ranks
            return device, name if ranks == 1 else f"{name}-{ranks}ranks"
        world, here = self.ranks.world_size, self._here
        if len(here) > 1:
            return device, f"{name}-ranks{'_'.join(map(str, here))}of{world}"
        return device, name if world == 1 else f"{name}-rank{self.ranks.rank}of{world}"
