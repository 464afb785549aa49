"""The front door of what writes and verifies: functions of the layers below that give back what users know.

They stand apart from :mod:`featstore.store`, because opening a store needs nothing of what they need; and
from one another, because packing needs nothing of what compiling needs.
"""
