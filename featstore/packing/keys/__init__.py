"""Keys of nodes: numbered, indexed, and looked up in a pack, out of core."""
