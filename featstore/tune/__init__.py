"""How many workers, threads and reads under way are fastest on this machine."""
