"""Rows in slots: the map, and the policies that decide what stays."""
