"""Rows from tiers, plan and engine."""
