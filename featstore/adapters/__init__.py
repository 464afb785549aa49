"""Adapters: the surface that each framework expects, over a store's reader; one module a framework."""
