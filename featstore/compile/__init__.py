"""A trace laid out: what is in memory when, and what lies where on disk."""
