"""Splitting a store by hosts: who owns which row, and a store for each of them."""
