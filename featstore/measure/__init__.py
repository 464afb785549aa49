"""What the device can do, and what a store gets of it."""
