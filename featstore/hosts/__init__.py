"""Several hosts, each with a part of the rows on its own disk: rows of other hosts come over the network.

A store that was split (:func:`featstore.split`) has on each host the rows that it owns, and the whole
topology, or the lists of the nodes that it owns (:mod:`featstore.hosts.lists`). What is asked of rows goes
to who owns them: to the host's own reader, or by a line to another host (:mod:`featstore.hosts.exchange`),
which serves from its own tiers. So a host is one more source of rows,
:class:`featstore.hosts.source.HostsSource`, over which buffers and devices stand as over the disk.

Lines are point to point, over a process group of ``torch.distributed`` that is nobody else's: nothing has to
happen on all hosts at the same time, one slow host keeps only those who want its rows, and hosts may have
different numbers of mini-batches. What is sent is checked by CRC-32C. The way in which rows are kept so that
they cross the network once follows MassiveGNN (Sarkar et al., CLUSTER'24).
"""
