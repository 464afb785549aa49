"""One loader for the ranks of a host: the rows are held once, and ``memory=`` is that of the host.

Ranks with a loader each hold a buffer, a compiled trace's slots, or resident partitions each: so many copies
of mostly the same rows. Here the first rank of the host owns the one loader that reads, of whatever mode. It
goes through the mini-batches of all ranks of the host in turn, number k of each, then number k + 1 of each
(:class:`featstore.sampling.batches.RankedBatches`), and hands each to its rank through shared memory
(:mod:`~featstore.loaders.host.slots`). What a rank gets is what its own loader would have given it: the same
mini-batches in as many steps.

- :mod:`~featstore.loaders.host.place`: which ranks are of this host, and how they find each other.
- :mod:`~featstore.loaders.host.line`: the sockets between them.
- :mod:`~featstore.loaders.host.service`: the owner's threads.
- :mod:`~featstore.loaders.host.mode`: a rank's side, a :class:`~featstore.loaders.modes.Mode` like any other.

**Lock-step.** A rank's mini-batch is made when those before it, of other ranks too, are handed over. Each
rank has two places, one for the mini-batch in use and one for the next: who is slower than that holds up the
others, as gradients that are averaged do. Epochs begin when all ranks have begun the same one.

**Ending.** A rank that breaks off an epoch, or closes its loader, leaves the others to go on. One that dies
is seen at once, by the end of its socket: everybody else gets ClosedError (of several hosts PeerError, which
names it). So it is when the owner dies or
closes; what it had handed over before, the others still get.

**Trust.** Ranks speak to processes of the same user alone, which the system tells (``SO_PEERCRED``). Samples
are pickled: who could send others could as well change the program.
"""
